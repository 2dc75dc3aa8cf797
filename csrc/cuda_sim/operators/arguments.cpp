#include "arguments.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <vector>

#include "generators.h"
#include "values.h"

extern "C" void sim_cuda_plant_error(int device, int error);

namespace sim_operators {

using c10::IValue;
using torch::jit::Stack;

namespace {

/// Whether a CUDA operator takes tensors of several devices.
bool takes_several_devices(const std::string& name) {
  for (const char* beginning :
       {"aten::_foreach", "aten::_fused", "aten::index", "aten::_index", "aten::_amp"}) {
    if (name.starts_with(beginning)) {
      return true;
    }
  }
  return false;
}

}  // namespace

Places places_of(const c10::FunctionSchema& schema, const Stack& arguments) {
  std::vector<at::Tensor> tensors;
  std::optional<c10::Device> device;
  for (const IValue& value : arguments) {
    changed(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        tensors.push_back(tensor);
      }
      return tensor;
    });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
    }
  }
  std::set<c10::DeviceIndex> all;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cuda()) {
      all.insert(tensor.device().index());
      device = device.value_or(tensor.device());
    }
  }
  if (!device || !device->has_index()) {
    device = c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  }
  all.insert(device->index());
  const bool mixes = takes_several_devices(schema.name());
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(mixes || tensor.dim() == 0 || tensor.device() == *device,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", tensor.device(), "!");
  }
  return {*device, std::move(all)};
}

void to_cpu(const c10::FunctionSchema& schema, c10::Device device, Stack* arguments,
            Aliases* aliases, bool* random) {
  for (size_t i = 0; i < arguments->size(); ++i) {
    IValue& value = (*arguments)[i];
    value = changed(value, *aliases);
    if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kCPU);
    }
    if (schema.arguments()[i].name() == "generator") {
      *random = false;
      const at::Generator cuda =
          value.isGenerator() ? value.toGenerator() : at::globalContext().defaultGenerator(device);
      if (cuda.device().is_cuda()) {
        value = cpu_generator(cuda);
      }
    }
  }
}

bool device_would_assert(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.find("out of range in self") != std::string::npos ||
         text.find("out of bounds") != std::string::npos;
}

void assert_on(c10::Device device) {
  constexpr int kErrorAssert = 710;
  sim_cuda_plant_error(device.index(), kErrorAssert);
}

}  // namespace sim_operators
