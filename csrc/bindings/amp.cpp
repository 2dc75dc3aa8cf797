#include <brimful/sizer/autocast.h>
#include <brimful/sizer/grad_scaler.h>
#include "bindings/bindings.h"

namespace brimful {

using namespace py::literals;

namespace {
/// The C++ guard from __enter__ to __exit__.
struct AutocastBlock {
  explicit AutocastBlock(c10::ScalarType of) : dtype(of) {}
  c10::ScalarType dtype;
  std::optional<Autocast> guard;
};
}  // namespace

/// The C++ guard and scaler, for their comparison with torch's own; Python programs use those.
void bind_amp(py::module_& m) {
  py::class_<AutocastBlock>(m, "_Autocast", "brimful::Autocast for the CPU, likewise.")
      .def(py::init<c10::ScalarType>(), "dtype"_a)
      .def("__enter__", [](AutocastBlock& self) { self.guard.emplace(at::kCPU, self.dtype); })
      .def("__exit__", [](AutocastBlock& self, const py::args&) { self.guard.reset(); });
  py::class_<GradScaler>(m, "_GradScaler", "brimful::GradScaler, to be compared with torch's.")
      .def(py::init([](double init_scale, double growth_factor, double backoff_factor,
                       int64_t growth_interval, bool enabled) {
             return std::make_unique<GradScaler>(GradScalerOptions{
                 init_scale, growth_factor, backoff_factor, growth_interval, enabled});
           }),
           py::kw_only(), "init_scale"_a = 65536.0, "growth_factor"_a = 2.0,
           "backoff_factor"_a = 0.5, "growth_interval"_a = 2000, "enabled"_a = true)
      .def("scale", &GradScaler::scale, "outputs"_a)
      .def(
          "unscale",
          [](GradScaler& scaler, int64_t key, const std::vector<at::Tensor>& parameters) {
            scaler.unscale_gradients(reinterpret_cast<const void*>(key), parameters);
          },
          "key"_a, "parameters"_a)
      .def(
          "step",
          [](GradScaler& scaler, int64_t key, const std::vector<at::Tensor>& parameters,
             const py::function& step) {
            return scaler.step_if_finite(reinterpret_cast<const void*>(key), parameters,
                                         [&] { step(); });
          },
          "key"_a, "parameters"_a, "step"_a)
      .def("update", &GradScaler::update, "new_scale"_a = py::none())
      .def("state", &GradScaler::state)
      .def("load_state", &GradScaler::load_state, "state"_a);
}

}  // namespace brimful
