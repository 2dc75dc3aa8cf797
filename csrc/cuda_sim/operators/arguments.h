#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <set>

#include "aliases.h"

namespace sim_operators {

struct Places {
  c10::Device device;              // the operator runs on
  std::set<c10::DeviceIndex> all;  // where its tensors are
};

/// Raises what CUDA's operators raise where tensors lie on several devices.
Places places_of(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments);

/// Turns the arguments into those for the CPU's kernel. `random`: whether it will draw from the default generator.
void to_cpu(const c10::FunctionSchema& schema, c10::Device device, torch::jit::Stack* arguments,
            Aliases* aliases, bool* random);

/// What a kernel asserts and a CPU kernel raises: an index among a tensor's values that is out of bounds.
bool device_would_assert(const c10::Error& error);
/// The device has failed, for good.
void assert_on(c10::Device device);

}  // namespace sim_operators
