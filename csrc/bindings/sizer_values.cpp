// What a BatchSizer returns: plain values.
#include <brimful/sizer/batch_sizer.h>
#include "sizer/climb.h"
#include "sizer/peak_model.h"

#include <sstream>

#include "base/format.h"
#include "bindings/sizer_parts.h"

namespace brimful {
namespace {

std::string outcome_repr(const Outcome& outcome) {
  std::ostringstream out;
  out << "Outcome(loss=" << outcome.loss << ", weight=" << outcome.weight
      << ", pieces=" << outcome.pieces << ", retries=" << outcome.retries
      << ", peak_bytes=" << outcome.peak_bytes << ", last=" << (outcome.last ? "True" : "False")
      << ")";
  return out.str();
}

std::string plan_repr(const Plan& plan) {
  std::ostringstream out;
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
      .def_readonly("pieces", &StepNote::pieces)
      .def_readonly("piece_rows", &StepNote::piece_rows)
      .def_readonly("retries", &StepNote::retries)
      .def_readonly("ooms", &StepNote::ooms)
      .def_readonly("peak_bytes", &StepNote::peak_bytes)
      .def_readonly("limit_bytes", &StepNote::limit_bytes)
      .def_readonly("total_ms", &StepNote::total_ms)
      .def_readonly("lost_ms", &StepNote::lost_ms)
      .def_readonly("stood", &StepNote::stood);
  py::class_<Report>(m, "Report", "What a BatchSizer has seen; see BatchSizer.report.")
      .def_readonly("steps", &Report::steps)
      .def_readonly("failed", &Report::failed)
      .def_readonly("retries", &Report::retries)
      .def_readonly("ooms", &Report::ooms)
      .def_readonly("cache_releases", &Report::cache_releases)
      .def_readonly("piece_rows", &Report::piece_rows)
      .def_readonly("limit_bytes", &Report::limit_bytes)
      .def_readonly("peak_bytes", &Report::peak_bytes)
      .def_readonly("last_fill", &Report::last_fill)
      .def_readonly("mean_fill", &Report::mean_fill)
      .def_readonly("most_fill", &Report::most_fill)
      .def_readonly("total_ms", &Report::total_ms)
      .def_readonly("lost_ms", &Report::lost_ms)
      .def_readonly("history", &Report::history)
      .def("__str__", [](const Report& report) { return to_string(report); });
}

void bind_outcome(py::module_& m) {
  py::class_<AttemptNote>(m, "Attempt", "One try of a step.")
      .def_readonly("pieces", &AttemptNote::pieces)
      .def_readonly("piece_rows", &AttemptNote::piece_rows)
      .def_readonly("peak_bytes", &AttemptNote::peak_bytes)
      .def_readonly("ran_out", &AttemptNote::ran_out)
      .def_readonly("buckets_launched", &AttemptNote::buckets_launched)
      .def_readonly("alone", &AttemptNote::alone)
      .def_readonly("cache_released", &AttemptNote::cache_released);
  py::class_<StepRungs>(m, "StepRungs", "What a step recomputed and offloaded; see Outcome.rungs.")
      .def(py::init([](std::vector<std::string> recomputed, std::vector<std::string> offloaded,
                       bool everything) {
             return StepRungs{std::move(recomputed), std::move(offloaded), everything};
           }),
           py::kw_only(), py::arg("recomputed") = std::vector<std::string>(),
           py::arg("offloaded") = std::vector<std::string>(), py::arg("everything") = false)
      .def_readonly("recomputed", &StepRungs::recomputed)
      .def_readonly("offloaded", &StepRungs::offloaded)
      .def_readonly("everything", &StepRungs::everything)
      .def("__bool__", [](const StepRungs& self) { return !self.empty(); })
      .def("__eq__", [](const StepRungs& self, const StepRungs& other) { return self == other; })
      .def("__repr__", [](const StepRungs& self) { return "StepRungs(" + to_string(self) + ")"; });
  py::class_<Outcome>(m, "Outcome", "How a step ended; see BatchSizer.step.")
      .def_readonly("loss", &Outcome::loss)
      .def_readonly("weight", &Outcome::weight)
      .def_readonly("pieces", &Outcome::pieces)
      .def_readonly("split", &Outcome::split)
      .def_readonly("rungs", &Outcome::rungs)
      .def_readonly("retries", &Outcome::retries)
      .def_readonly("peak_bytes", &Outcome::peak_bytes)
      .def_readonly("work_ms", &Outcome::work_ms)
      .def_readonly("last", &Outcome::last)
      .def_readonly("attempts", &Outcome::attempts)
      .def("__repr__", &outcome_repr);
}

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan", "What a step would take; see BatchSizer.plan.")
      .def_readonly("pieces", &Plan::pieces)
      .def_readonly("piece_rows", &Plan::piece_rows)
      .def_readonly("used_bytes", &Plan::used_bytes)
      .def_readonly("kept_bytes", &Plan::kept_bytes)
      .def_readonly("peak_bytes", &Plan::peak_bytes)
      .def_readonly("reserved_bytes", &Plan::reserved_bytes)
      .def_readonly("limit_bytes", &Plan::limit_bytes)
      .def_readonly("margin_bytes", &Plan::margin_bytes)
      .def_readonly("workspaces_unknown", &Plan::workspaces_unknown)
      .def_readonly("whole_bytes", &Plan::whole_bytes)
      .def_readonly("parameter_bytes", &Plan::parameter_bytes)
      .def_readonly("gradient_bytes", &Plan::gradient_bytes)
      .def_readonly("optimizer_bytes", &Plan::optimizer_bytes)
      .def_readonly("buffer_bytes", &Plan::buffer_bytes)
      .def_readonly("activation_bytes", &Plan::activation_bytes)
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
