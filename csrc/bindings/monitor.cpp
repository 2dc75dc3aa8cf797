#include <brimful/probes/doctor.h>
#include <brimful/probes/loader_advice.h>
#include <brimful/probes/monitor.h>
#include <pybind11/functional.h>
#include "bindings/fields.h"
#include "bindings/gil.h"
#include "bindings/native_read.h"

namespace brimful {
namespace {

using namespace probes;
using namespace py::literals;

/// Calls a writer of Python's from the monitor's thread. Holds it until the monitor goes.
AddScalar as_add_scalar(const py::object& writer) {
  if (writer.is_none()) {
    return nullptr;
  }
  const auto method = shared_object(py::object(writer.attr("add_scalar")));
  return [method](const std::string& tag, double value, int64_t step) {
    const Gil gil;
    try {
      (*method)(tag, value, step);
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error_text(error));  // must not leave this scope as a Python object
    }
  };
}

/// The monitor's thread, which is waited for, may be about to call a Python writer.
struct DeleteWithoutGil {
  void operator()(Monitor* monitor) const {
    const py::gil_scoped_release no_gil;
    delete monitor;
  }
};

void bind_sampler(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "_gpus_json", [] { return to_json(read_gpus()); }, NoGil());
  m.def(
      "_sample_json", [](int64_t pid) { return to_json(take_sample(pid)); }, "pid"_a = 0, NoGil());
  m.def(
      "_sample_table", [](int64_t pid) { return to_table(take_sample(pid)); }, "pid"_a = 0,
      NoGil());
  m.def(
      "_sample_prometheus", [] { return to_prometheus(take_sample()); }, NoGil());
  m.def("_usable_cpus", &usable_cpus);
  m.def(
      "_private_bytes",
      [](int64_t pid) {
        const auto process = read_process(pid);
        return process ? process->uss_bytes : std::nullopt;
      },
      "pid"_a, NoGil());
  py::class_<Monitor, std::unique_ptr<Monitor, DeleteWithoutGil>>(m, "_Monitor")
      .def(py::init([](int64_t interval_ms, std::string json, std::string prometheus,
                       const py::object& writer) {
             return std::unique_ptr<Monitor, DeleteWithoutGil>(new Monitor(
                 {interval_ms, std::move(json), std::move(prometheus), as_add_scalar(writer)}));
           }),
           "interval_ms"_a, "json"_a, "prometheus"_a, "writer"_a)
      .def("stop", &Monitor::stop, NoGil())
      .def_property_readonly("samples", &Monitor::samples);
}

void bind_advice(py::module_& m) {
  py::class_<LoaderAdvice>(m, "LoaderAdvice", "What to change about a loader, and why.")
      .BRIMFUL_FIELDS(def_readonly, LoaderAdvice, wait_share, num_workers, prefetch_factor,
                      pin_memory, persistent_workers, reasons)
      .def("__repr__", [](const LoaderAdvice& advice) {
        std::string text = "LoaderAdvice(num_workers=" + std::to_string(advice.num_workers) + "):";
        for (const auto& reason : advice.reasons) {
          text += "\n- " + reason;
        }
        return text;
      });
  m.def(
      "_advise_loader",
      [](int64_t steps, double wait_ms, std::optional<int64_t> late_steps, double work_ms,
         std::optional<double> copy_ms, double first_wait_ms, int64_t epochs, int64_t num_workers,
         std::optional<int64_t> prefetch_factor, bool pin_memory, bool persistent_workers,
         bool cuda, double cpus, int64_t processes, std::optional<int64_t> worker_growth_bytes) {
        return advise_loader({.steps = steps,
                              .wait_ms = wait_ms,
                              .late_steps = late_steps,
                              .work_ms = work_ms,
                              .copy_ms = copy_ms,
                              .first_wait_ms = first_wait_ms,
                              .epochs = epochs,
                              .num_workers = num_workers,
                              .prefetch_factor = prefetch_factor,
                              .pin_memory = pin_memory,
                              .persistent_workers = persistent_workers,
                              .cuda = cuda,
                              .cpus = cpus,
                              .processes = processes,
                              .worker_growth_bytes = worker_growth_bytes});
      },
      py::kw_only(), "steps"_a, "wait_ms"_a, "late_steps"_a = py::none(), "work_ms"_a,
      "copy_ms"_a = py::none(), "first_wait_ms"_a = 0, "epochs"_a = 1, "num_workers"_a = 0,
      "prefetch_factor"_a = py::none(), "pin_memory"_a = false, "persistent_workers"_a = false,
      "cuda"_a = false, "cpus"_a = 1, "processes"_a = 1, "worker_growth_bytes"_a = py::none());
}

using Line = std::tuple<std::string, std::string, std::string, std::string>;

void bind_doctor(py::module_& m) {
  m.def(
      "_check_machine",
      [](bool cuda_wanted) {
        std::vector<Finding> findings{check_build(build_facts(), cuda_wanted)};
        for (auto& found : {check_limits(limits_now()), check_gpus(read_gpus(), cuda_wanted)}) {
          findings.insert(findings.end(), found.begin(), found.end());
        }
        std::vector<Line> lines;
        lines.reserve(findings.size());
        for (const auto& finding : findings) {
          lines.emplace_back(finding.name, name_of(finding.health), finding.found, finding.remedy);
        }
        return lines;
      },
      "cuda_wanted"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_monitor(py::module_& m) {
  bind_sampler(m);
  bind_advice(m);
  bind_doctor(m);
}

}  // namespace brimful
