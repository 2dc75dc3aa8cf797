#include <brimful/sizer/batch_norm.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "bindings/callbacks.h"
#include "bindings/sizer_parts.h"

namespace brimful {
namespace {

BatchNormState state_of(const py::object& module) {
  if (module.is_none()) {
    return {false, true, std::nullopt};
  }
  return {module.attr("training").cast<bool>(),
          module.attr("track_running_stats").cast<bool>() && !module.attr("running_mean").is_none(),
          module.attr("momentum").cast<std::optional<double>>()};
}

at::Tensor buffer_of(const py::object& module, const char* name) {
  const py::object buffer = module.attr(name);
  return buffer.is_none() ? at::Tensor() : THPVariable_Unpack(buffer.ptr());
}

BatchNormModule batch_norm_of(const std::string& name, const py::object& object) {
  const auto module = shared_object(py::weakref(object));
  BatchNormModule made;
  made.name = name;
  made.state = [module] { return call_python([&] { return state_of((*module)()); }); };
  made.set_momentum = [module](std::optional<double> momentum) {
    call_python([&] {
      const py::object alive = (*module)();
      if (!alive.is_none()) {
        alive.attr("momentum") = momentum;
      }
    });
  };
  made.buffers = [module] {
    return call_python([&]() -> BatchNormBuffers {
      const py::object alive = (*module)();
      if (alive.is_none()) {
        return {};
      }
      return {buffer_of(alive, "running_mean"), buffer_of(alive, "running_var"),
              buffer_of(alive, "num_batches_tracked")};
    });
  };
  return made;
}

std::vector<at::Tensor> statistics_of(const py::object& module) {
  std::vector<at::Tensor> found;
  if (module.is_none()) {
    return found;
  }
  for (const auto& [name, buffer] : module.attr("_buffers").cast<py::dict>()) {
    if (THPVariable_Check(buffer.ptr()) && THPVariable_Unpack(buffer.ptr()).is_floating_point() &&
        names_statistics(name.cast<std::string>())) {
      found.push_back(THPVariable_Unpack(buffer.ptr()));
    }
  }
  return found;
}

BatchNormModule other_norm_of(const std::string& name, const py::object& object) {
  const auto module = shared_object(py::weakref(object));
  BatchNormModule made;
  made.name = name;
  made.state = [module] {
    return call_python([&] {
      const py::object alive = (*module)();
      return BatchNormState{!alive.is_none() && alive.attr("training").cast<bool>(), true,
                            std::nullopt};
    });
  };
  made.statistics = [module] { return call_python([&] { return statistics_of((*module)()); }); };
  return made;
}
}  // namespace

std::vector<BatchNormModule> batch_norms_of(
    const std::vector<std::pair<std::string, py::object>>& modules) {
  const py::object torchs = py::module_::import("torch.nn.modules.batchnorm").attr("_BatchNorm");
  std::vector<BatchNormModule> made;
  for (const auto& [name, module] : modules) {
    if (py::isinstance(module, torchs)) {
      made.push_back(batch_norm_of(name, module));
    } else if (!statistics_of(module).empty()) {
      made.push_back(other_norm_of(name, module));
    }
  }
  return made;
}

}  // namespace brimful
