#include <brimful/pipeline/split_backward.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fields.h"

namespace brimful {
namespace {
using pipeline::InputBackward;

std::vector<at::Tensor> or_undefined(std::vector<std::optional<at::Tensor>>&& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (auto& tensor : tensors) {
    result.push_back(std::move(tensor).value_or(at::Tensor()));
  }
  return result;
}

template <auto run>
auto without_gil(const std::vector<at::Tensor>& outputs,
                 std::vector<std::optional<at::Tensor>> output_gradients,
                 const std::vector<at::Tensor>& inputs) {
  const auto gradients = or_undefined(std::move(output_gradients));
  const py::gil_scoped_release no_gil;
  return run(outputs, gradients, inputs);
}
}  // namespace

void bind_split_backward(py::module_& m) {
  py::class_<InputBackward>(m, "_InputBackward")
      .def_readonly("input_gradients", &InputBackward::input_gradients)
      .def("take_input_gradients",
           [](InputBackward& self) { return std::exchange(self.input_gradients, {}); })
      .BRIMFUL_FIELDS(def_readonly, InputBackward, split, note, recomputed)
      .def_property_readonly("empty",
                             [](const InputBackward& self) { return self.weight_work.empty(); })
      .def_property_readonly("bytes",
                             [](const InputBackward& self) { return self.weight_work.bytes(); })
      .def(
          "run_weight", [](InputBackward& self) { self.weight_work.run(); },
          py::call_guard<py::gil_scoped_release>());
  m.def("_backward_full", &without_gil<&pipeline::backward_full>, py::arg("outputs"),
        py::arg("output_gradients"), py::arg("inputs"));
  m.def("_backward_input", &without_gil<&pipeline::backward_input>, py::arg("outputs"),
        py::arg("output_gradients"), py::arg("inputs"));
}

}  // namespace brimful
