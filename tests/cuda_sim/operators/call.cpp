// Work happens inside the call, after all that was asked of the current stream: to the host an operator is synchronous.
#include "call.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <set>
#include <string>
#include <vector>

#include "aliases.h"
#include "backend.h"
#include "generators.h"
#include "values.h"

extern "C" void sim_cuda_plant_error(int device, int error);

namespace sim_operators {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr int kErrorAssert = 710;

/// What a kernel asserts and a CPU kernel raises: an index among a tensor's values that is out of bounds.
bool device_would_assert(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.find("out of range in self") != std::string::npos ||
         text.find("out of bounds") != std::string::npos;
}

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

struct Places {
  c10::Device device;              // the operator runs on
  std::set<c10::DeviceIndex> all;  // where its tensors are
};

/// Raises what CUDA's operators raise where tensors lie on several devices.
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

/// The arguments for the CPU's kernel. `random`: whether it will draw from the default generator.
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

void run_kernel(const c10::OperatorHandle& op, c10::Device device, bool random, Stack* arguments) {
  std::optional<DefaultGenerator> generator;
  if (random) {
    generator.emplace(cpu_generator(at::globalContext().defaultGenerator(device)));
  }
  const BackendOnly only;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  try {
    op.callBoxed(arguments);
  } catch (const c10::IndexError& error) {
    if (!device_would_assert(error)) {
      throw;
    }
    sim_cuda_plant_error(device.index(), kErrorAssert);
  }
}

}  // namespace

void finish_stream(c10::Device device) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device).synchronize();
}

void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = static_cast<int64_t>(schema.arguments().size());
  Stack arguments(stack->end() - count, stack->end());
  const Places places = places_of(schema, arguments);
  const c10::OptionalDeviceGuard guard(places.device);
  for (const c10::DeviceIndex index : places.all) {
    finish_stream(c10::Device(c10::kCUDA, index));
  }
  Aliases aliases;
  bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  to_cpu(schema, places.device, &arguments, &aliases, &random);
  run_kernel(op, places.device, random, &arguments);
  finish_stream(places.device);  // raises the assertion, as with CUDA_LAUNCH_BLOCKING=1
  aliases.write_back();
  stack->erase(stack->end() - count, stack->end());
  for (const IValue& value : arguments) {
    stack->push_back(changed(
        value, [&](const at::Tensor& tensor) { return aliases.result(tensor, places.device); }));
  }
}

}  // namespace sim_operators
