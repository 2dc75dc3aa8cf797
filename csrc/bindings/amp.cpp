#include <brimful/sizer/grad_scaler.h>
#include "bindings/bindings.h"

namespace brimful {

using namespace py::literals;

/// The C++ scaler, for its comparison with torch's own; Python programs use that one.
void bind_amp(py::module_& m) {
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
