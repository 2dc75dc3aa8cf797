#include <brimful/probes/summary.h>
#include <pybind11/functional.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "bindings/fields.h"
#include "sizer/small_steps.h"

namespace brimful {

using namespace probes;
namespace {

// For JSON and data frames: all that can be read of a value, by its name.
py::dict dict_of(const py::object& self, const py::handle& type) {
  py::dict found;
  for (const auto& entry : py::dict(type.attr("__dict__"))) {
    if (py::isinstance(entry.second, py::module_::import("builtins").attr("property"))) {
      found[entry.first] = self.attr(entry.first);
    }
  }
  return found;
}

py::dict summary_as_dict(const py::object& self) {
  py::dict found = dict_of(self, py::type::of<StepSummary>());
  py::list rows;
  for (const auto& row : found["modules"]) {
    rows.append(dict_of(py::reinterpret_borrow<py::object>(row), py::type::of<ModuleRow>()));
  }
  found["modules"] = rows;
  return found;
}

void look_beyond(const SmallSteps& steps, StepSummary& found) {
  const auto peak_bytes = steps.peak_bytes(found.rows);
  if (!peak_bytes) {
    return;
  }
  const auto more_bytes = *steps.peak_bytes(2 * found.rows) - *peak_bytes;
  found.bytes_per_row = static_cast<double>(more_bytes) / static_cast<double>(found.rows);
  found.limit_bytes = steps.limit_bytes();
  found.largest_rows = steps.largest_rows();
}

void bind_summary_figures(py::module_& m) {
  py::class_<ModuleRow>(m, "ModuleRow", "What one module takes, with all that is inside it.")
      .def(py::init<>())
      .BRIMFUL_FIELDS(def_readwrite, ModuleRow, name, type, depth, calls, inputs, outputs,
                      output_bytes, trainable, frozen, parameter_bytes, shares, buffer_bytes,
                      multiply_adds, activation_bytes, saved_bytes, forward_peak_bytes,
                      backward_peak_bytes);
  py::class_<StepSummary>(m, "StepSummary", "What a step of training takes, measured.")
      .def(py::init<>())
      .BRIMFUL_FIELDS(def_readwrite, StepSummary, modules, mode, device, rows, used_bytes,
                      forward_peak_bytes, backward_peak_bytes, optimizer_peak_bytes, peak_bytes,
                      predicted_bytes, margin_bytes, workspaces_unknown, bytes_per_row, limit_bytes,
                      largest_rows, limit_plan)
      .def("__str__", [](const StepSummary& self) { return to_string(self); })
      .def("to_dict", &summary_as_dict)
      .def("_repr_html_", [](const StepSummary& self) { return to_html(self); });
}

}  // namespace

void bind_summary(py::module_& m) {
  py::class_<MemorySpan>(m, "_MemorySpan")
      .def(py::init([](std::vector<int64_t> modules, bool backward, int64_t peak_bytes,
                       int64_t change_bytes) {
             return MemorySpan{std::move(modules), backward, peak_bytes, change_bytes};
           }),
           py::arg("modules"), py::arg("backward"), py::arg("peak_bytes"), py::arg("change_bytes"));
  bind_summary_figures(m);
  py::class_<SmallSteps>(m, "_SmallSteps", "What steps with a few rows say of those with more.")
      .def(py::init([](py::handle device) { return SmallSteps(as_device(device)); }),
           py::arg("device"))
      .def("run", &SmallSteps::run, py::arg("rows"), py::arg("step_with"))
      .def("run_whole", &SmallSteps::run_whole, py::arg("rows"), py::arg("step"))
      .def("look", &SmallSteps::look, py::arg("rows"), py::arg("batch"), py::arg("gone"))
      .def("peak_bytes", &SmallSteps::peak_bytes, py::arg("rows"))
      .def(
          "predict",
          [](const SmallSteps& self, StepSummary& found) {
            found.predicted_bytes = self.peak_bytes(found.rows);
            found.margin_bytes = self.margin_bytes(found.rows);
            found.workspaces_unknown = self.workspaces_unknown();
          },
          py::arg("found"))
      .def("look_beyond", &look_beyond, py::arg("found"));
  m.def(
      "_charge_modules",
      [](std::vector<ModuleRow> modules, const std::vector<MemorySpan>& spans) {
        charge(modules, spans);
        return modules;
      },
      py::arg("modules"), py::arg("spans"));
}

}  // namespace brimful
