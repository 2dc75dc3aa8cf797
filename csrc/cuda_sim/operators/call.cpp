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
#include "arguments.h"
#include "backend.h"
#include "deferred.h"
#include "generators.h"
#include "in_order.h"
#include "kernel.h"
#include "values.h"
#include "workspace.h"

extern "C" void sim_cuda_note_operator();

namespace sim_operators {
namespace {

using c10::IValue;
using torch::jit::Stack;

void run_kernel(const c10::OperatorHandle& op, c10::Device device, bool random, Stack* arguments) {
  std::optional<DefaultGenerator> generator;
  if (random) {
    generator.emplace(cpu_generator(at::globalContext().defaultGenerator(device)));
  }
  const BackendOnly only;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  try {
    call_kernel(op, arguments);
  } catch (const c10::IndexError& error) {
    if (!device_would_assert(error)) {
      throw;
    }
    assert_on(device);
  }
}

}  // namespace

void finish_stream(c10::Device device) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device).synchronize();
}

void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  sim_cuda_note_operator();
  const auto& schema = op.schema();
  const auto count = static_cast<int64_t>(schema.arguments().size());
  Stack arguments(stack->end() - count, stack->end());
  const Places places = places_of(schema, arguments);
  const c10::OptionalDeviceGuard guard(places.device);
  if (call_later(op, places, &arguments)) {
    stack->erase(stack->end() - count, stack->end());
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    return;
  }
  for (const c10::DeviceIndex index : places.all) {
    finish_stream(c10::Device(c10::kCUDA, index));
  }
  Aliases aliases;
  bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  to_cpu(schema, places.device, &arguments, &aliases, &random);
  call_in_order(places.device, [&] { run_kernel(op, places.device, random, &arguments); });
  finish_stream(places.device);  // raises the assertion, as with CUDA_LAUNCH_BLOCKING=1
  aliases.write_back();
  stack->erase(stack->end() - count, stack->end());
  for (const IValue& value : arguments) {
    stack->push_back(changed(
        value, [&](const at::Tensor& tensor) { return aliases.result(tensor, places.device); }));
  }
}

void call_with_workspace(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = static_cast<int64_t>(op.schema().arguments().size());
  const Places places = places_of(op.schema(), Stack(stack->end() - count, stack->end()));
  const c10::OptionalDeviceGuard guard(places.device);
  const at::DataPtr lent = workspace();
  call_on_cpu(op, stack);
}

void call_with_convolution_workspace(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto first = stack->end() - static_cast<int64_t>(schema.arguments().size());
  const Places places = places_of(schema, Stack(first, stack->end()));
  const c10::OptionalDeviceGuard guard(places.device);
  const bool is_backward = schema.name() == "aten::convolution_backward";
  const at::DataPtr lent = convolution_workspace((first + (is_backward ? 1 : 0))->toTensor());
  call_on_cpu(op, stack);
}

}  // namespace sim_operators
