#include <brimful/probes/oom_report.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "bindings/labels.h"
#include "probes/oom/program.h"

namespace brimful {
namespace {

using namespace probes;
using namespace py::literals;

using Words = std::tuple<std::string, int64_t, bool>;

OomProgram as_program(const py::tuple& found) {
  OomProgram program;
  for (const auto& [name, bytes, training] : found[0].cast<std::vector<Words>>()) {
    program.models.push_back({name, bytes, training});
  }
  program.optimizers = found[1].cast<std::vector<std::string>>();
  program.uses_sizer = found[2].cast<bool>();
  program.building = found[4].cast<bool>();
  program.labels = labels_of(found[3].cast<std::vector<std::pair<at::Tensor, std::string>>>());
  return program;
}

/// Threads that Python does not know (autograd's of a device, a process group's) may hold what its threads wait for.
std::optional<OomProgram> read_program() {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) {
    return std::nullopt;
  }
  const py::gil_scoped_acquire gil;
  py::error_scope pending;  // the refusal may be within another error's handling
  try {
    const auto module = py::module_::import("brimful.memory._oom");
    return as_program(module.attr("program")());
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

void bind_oom_report(py::module_& m) {
  py::class_<OomFinding>(m, "OomFinding", "A cause of an out-of-memory error, and what to change.")
      .def_property_readonly("cause", [](const OomFinding& self) { return name_of(self.cause); })
      .BRIMFUL_FIELDS(def_readonly, OomFinding, bytes, text, advice)
      .def("__repr__", [](const OomFinding& self) {
        return std::string("<OomFinding ") + name_of(self.cause) + ": " + self.text + ">";
      });
  py::class_<OomFacts>(m, "OomReport", "What filled the memory when a request was refused.")
      .BRIMFUL_FIELDS(def_readonly, OomFacts, device, request_bytes, used_bytes, limit_bytes,
                      largest_bytes, step)
      .def_property_readonly("phase",
                             [](const OomFacts& self) { return memory::name_of(self.phase); })
      .def_readonly("place", &OomFacts::place)
      .def_property_readonly("findings", &findings)
      .def_property_readonly("short", &to_short_string)
      .def("__str__", [](const OomFacts& facts) { return to_string(facts); })
      .def("_repr_html_", [](const OomFacts& facts) { return to_html(facts); });
  m.def("memory_last_oom", &last_oom);
  m.def("_set_oom_report_path", &set_oom_report_path, "path"_a);
  m.def("_write_pending_oom_report", &write_pending_oom_report,
        py::call_guard<py::gil_scoped_release>());
  set_oom_program_reader(&read_program);
  watch_ooms();
}

}  // namespace brimful
