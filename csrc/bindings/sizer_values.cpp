// What a BatchSizer returns: plain values.
#include <brimful/sizer/batch_sizer.h>
#include "base/text_stream.h"
#include "sizer/climb.h"
#include "sizer/peak_model.h"

#include "base/format.h"
#include "bindings/fields.h"
#include "bindings/sizer_parts.h"

namespace brimful {
namespace {

std::string outcome_repr(const Outcome& outcome) {
  TextStream out;
  out << "Outcome(loss=" << outcome.loss.value() << ", weight=" << outcome.weight.value()
      << ", pieces=" << outcome.pieces << ", retries=" << outcome.retries
      << ", peak_bytes=" << outcome.peak_bytes << ", last=" << (outcome.last ? "True" : "False")
      << ")";
  return out.str();
}

std::string plan_repr(const Plan& plan) {
  TextStream out;
  out << "Plan(pieces=" << plan.pieces << ", piece_rows=" << plan.piece_rows
      << ", peak=" << format_bytes(plan.peak_bytes)
      << (plan.reserved_bytes ? ", reserved=" + format_bytes(*plan.reserved_bytes) : "")
      << ", used=" << format_bytes(plan.used_bytes)
      << ", limit=" << (plan.limit_bytes ? format_bytes(*plan.limit_bytes) : "None")
      << (plan.margin_bytes > 0 ? ", margin=" + format_bytes(plan.margin_bytes) : "")
      << (plan.workspaces_unknown ? ", workspaces unknown" : "")
      << ", parameters=" << format_bytes(plan.parameter_bytes)
      << ", gradients=" << format_bytes(plan.gradient_bytes)
      << ", optimizer=" << format_bytes(plan.optimizer_bytes)
      << ", buffers=" << format_bytes(plan.buffer_bytes)
      << ", activations=" << format_bytes(plan.activation_bytes) << ")";
  return out.str();
}

void bind_peak_model(py::module_& m) {
  py::class_<PeakModel>(m, "PeakModel", "How the peak of a piece of work depends on its rows.")
      .def_static(
          "fit",
          [](const std::vector<std::pair<int64_t, memory::Trace>>& traces) {
            std::vector<TracedRows> traced;
            traced.reserve(traces.size());
            for (const auto& [rows, trace] : traces) {
              traced.push_back({rows, trace});
            }
            return PeakModel::fit(std::move(traced));
          },
          py::arg("traces"))
      .def("peak_bytes", &PeakModel::peak_bytes, py::arg("rows"))
      .def("largest_rows", &PeakModel::largest_rows, py::arg("bytes"), py::arg("at_most"))
      .def_property_readonly("off_line", &PeakModel::off_line);
}

void bind_report(py::module_& m) {
  py::class_<StepNote>(m, "StepNote", "A step as a Report remembers it.")
      .BRIMFUL_FIELDS(def_readonly, StepNote, pieces, piece_rows, retries, ooms, peak_bytes,
                      limit_bytes, total_ms, lost_ms, stood);
  py::class_<Report>(m, "Report", "What a BatchSizer has seen; see BatchSizer.report.")
      .BRIMFUL_FIELDS(def_readonly, Report, steps, failed, retries, ooms, cache_releases,
                      garbage_collections, piece_rows, limit_bytes, peak_bytes, last_fill,
                      mean_fill, most_fill, total_ms, lost_ms, rungs, loss_rule, trial_runs,
                      trial_ms, history)
      .def("__str__", [](const Report& report) { return to_string(report); });
}

void bind_outcome(py::module_& m) {
  py::class_<AttemptNote>(m, "Attempt", "One try of a step.")
      .BRIMFUL_FIELDS(def_readonly, AttemptNote, pieces, piece_rows, peak_bytes, ran_out,
                      buckets_launched, alone, cache_released, garbage_bytes, rungs);
  py::class_<StepRungs>(m, "StepRungs", "What a step recomputed and offloaded; see Outcome.rungs.")
      .def(py::init([](std::vector<std::string> recomputed, std::vector<std::string> offloaded,
                       bool everything) {
             return StepRungs{std::move(recomputed), std::move(offloaded), everything};
           }),
           py::kw_only(), py::arg("recomputed") = std::vector<std::string>(),
           py::arg("offloaded") = std::vector<std::string>(), py::arg("everything") = false)
      .BRIMFUL_FIELDS(def_readonly, StepRungs, recomputed, offloaded, everything)
      .def("__bool__", [](const StepRungs& self) { return !self.empty(); })
      .def("__eq__", [](const StepRungs& self, const StepRungs& other) { return self == other; })
      .def("__str__", [](const StepRungs& self) { return to_string(self); })
      .def("__repr__", [](const StepRungs& self) { return "StepRungs(" + to_string(self) + ")"; });
  py::class_<StageNote>(m, "StageNote", "A stage's part of a step.")
      .BRIMFUL_FIELDS(def_readonly, StageNote, peak_live, forward_ms, backward_ms, wait_ms,
                      peak_live_bytes, parameter_bytes, gradient_bytes, buffer_bytes, split_note,
                      recomputed, offloaded);
  py::class_<Outcome>(m, "Outcome", "How a step ended; see BatchSizer.step and Pipeline.step.")
      .BRIMFUL_FIELDS(def_readonly, Outcome, losses, pieces, split, order, rungs, retries, total_ms,
                      peak_bytes, peaks, work_ms, last, stop, regroup, attempts, stages)
      .def_property_readonly("loss",
                             [](const Outcome& outcome) {
                               const py::gil_scoped_release no_gil;
                               return outcome.loss.value();
                             })
      .def_property_readonly("weight",
                             [](const Outcome& outcome) {
                               const py::gil_scoped_release no_gil;
                               return outcome.weight.value();
                             })
      .def("__repr__", &outcome_repr);
}

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan", "What a step would take; see BatchSizer.plan.")
      .BRIMFUL_FIELDS(def_readonly, Plan, pieces, piece_rows, split, used_bytes, kept_bytes,
                      peak_bytes, reserved_bytes, limit_bytes, margin_bytes, workspaces_unknown,
                      whole_bytes, parameter_bytes, gradient_bytes, optimizer_bytes, buffer_bytes,
                      activation_bytes)
      .def("__repr__", &plan_repr);
}
}  // namespace

void bind_sizer_values(py::module_& m) {
  bind_peak_model(m);
  bind_report(m);
  bind_outcome(m);
  bind_plan(m);
}

}  // namespace brimful
