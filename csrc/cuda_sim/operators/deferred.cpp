// Operators that run when their stream comes to them, as kernels do: what they read is what lies there then, and a missing
// wait between two streams gives wrong values. Torch's meta kernel says beforehand how large the results are.
#include "deferred.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>

#include <cstdio>
#include <exception>
#include <utility>
#include <vector>

#include "backend.h"
#include "in_order.h"
#include "kernel.h"
#include "values.h"

extern "C" void sim_cuda_plant_error(int device, int error);

namespace sim_operators {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr int kErrorLaunchFailure = 719;

/// What the stream does when it comes to it.
struct Job {
  c10::OperatorHandle op;
  c10::Device device;
  Stack arguments;  // on the CPU, on the device's memory
  std::vector<at::Tensor>
      targets;  // of new results, in their order; undefined for those that are arguments
};

std::vector<at::Tensor> tensors_of(const Stack& values) {
  std::vector<at::Tensor> found;
  for (const IValue& value : values) {
    changed(value, [&](const at::Tensor& tensor) {
      found.push_back(tensor);
      return tensor;
    });
  }
  return found;
}

void run(Job& job) {
  const BackendOnly only;
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  call_kernel(job.op, &job.arguments);
  const auto results = tensors_of(job.arguments);
  TORCH_CHECK(results.size() == job.targets.size(), "another number of results");
  for (size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& target = job.targets[i];
    if (target.defined()) {
      TORCH_CHECK(results[i].defined() && results[i].sizes() == target.sizes() &&
                      results[i].dtype() == target.dtype(),
                  "another result than its meta kernel says");
      target.copy_(results[i]);
    }
  }
}

/// There is no caller left to raise to: as with a kernel, the device fails.
void run_or_fail(Job& job) {
  try {
    run(job);
  } catch (const c10::IndexError& error) {
    if (device_would_assert(error)) {
      assert_on(job.device);
      return;
    }
    std::fprintf(stderr, "simulated CUDA: %s\n", error.what());
    sim_cuda_plant_error(job.device.index(), kErrorLaunchFailure);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simulated CUDA: %s: %s\n", job.op.schema().name().c_str(), error.what());
    sim_cuda_plant_error(job.device.index(), kErrorLaunchFailure);
  }
}

at::Tensor like(const at::Tensor& tensor, c10::Device device) {
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

/// An operator's arguments as meta tensors, which have sizes and no values.
class Shapes {
 public:
  at::Tensor operator()(const at::Tensor& real) {
    if (!real.defined() || (real.is_cpu() && real.dim() == 0)) {
      return real;  // numbers go with tensors of any device
    }
    for (const auto& [theirs, shape] : pairs_) {
      if (theirs.is_same(real)) {
        return shape;
      }
    }
    auto shape = like(real, c10::kMeta);
    pairs_.emplace_back(real, shape);
    return shape;
  }

  /// Whether the operator left the arguments' sizes as they were.
  bool stand() const {
    for (const auto& [theirs, shape] : pairs_) {
      if (theirs.sizes() != shape.sizes() || theirs.strides() != shape.strides()) {
        return false;
      }
    }
    return true;
  }

  /// The argument that a result is; undefined for a new one.
  at::Tensor argument(const at::Tensor& result) const {
    for (const auto& [theirs, shape] : pairs_) {
      if (shape.is_same(result)) {
        return theirs;
      }
    }
    return {};
  }

  bool is_view_of_argument(const at::Tensor& result) const {
    for (const auto& [theirs, shape] : pairs_) {
      if (shape.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return true;
      }
    }
    return false;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

/// The results' sizes; false where only the values decide, or the operator is going to raise.
bool find_shapes(const c10::OperatorHandle& op, Stack* stack, Shapes* shapes) {
  // Of embedding bags the meta kernel speaks for CUDA's, whose further results have other sizes than the CPU's.
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta) ||
      op.schema().name().starts_with("aten::_embedding_bag")) {
    return false;
  }
  for (const auto& returned : op.schema().returns()) {
    const auto kind = returned.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
      return false;
    }
  }
  for (IValue& value : *stack) {
    value = changed(value, *shapes);
    if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kMeta);
    }
    if (value.isGenerator()) {
      value = IValue();
    }
  }
  const BackendOnly only;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return false;
  }
  for (const at::Tensor& result : tensors_of(*stack)) {
    if (result.defined() && !result.is_meta()) {
      return false;
    }
    if (result.defined() && !shapes->argument(result).defined() &&
        shapes->is_view_of_argument(result)) {
      return false;
    }
  }
  return shapes->stand();
}

/// What the host changes after the call is no concern of a kernel.
void keep_host_values(Stack* arguments) {
  for (IValue& value : *arguments) {
    value = changed(value, [](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cpu()) {
        return tensor;
      }
      auto kept = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        kept.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      return kept;
    });
  }
}

}  // namespace

bool call_later(const c10::OperatorHandle& op, const Places& places, Stack* arguments) {
  if (places.all.size() > 1 || !defers(places.device) ||
      op.hasTag(at::Tag::nondeterministic_seeded)) {
    return false;
  }
  Shapes shapes;
  Stack results = *arguments;
  if (!find_shapes(op, &results, &shapes)) {
    return false;
  }
  Aliases aliases;
  Job job{op, places.device, *arguments, {}};
  bool random = false;
  keep_host_values(&job.arguments);
  to_cpu(op.schema(), places.device, &job.arguments, &aliases, &random);
  for (IValue& value : results) {
    value = changed(value, [&](const at::Tensor& shape) {
      at::Tensor result = shape.defined() ? shapes.argument(shape) : shape;
      at::Tensor target;
      if (shape.defined() && !result.defined()) {
        result = like(shape, places.device);
        target = aliases(result);
      }
      job.targets.push_back(target);
      return result;
    });
  }
  enqueue(places.device, [job = std::move(job)]() mutable { run_or_fail(job); });
  *arguments = std::move(results);
  return true;
}

bool copy_later(const at::Tensor& to, const at::Tensor& from) {
  if (to.device() != from.device() || !defers(to.device())) {
    return false;
  }
  static const auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Aliases aliases;
  Stack arguments{aliases(to), aliases(from), false};
  Job job{copy, to.device(), std::move(arguments), {at::Tensor()}};
  enqueue(to.device(), [job = std::move(job)]() mutable { run_or_fail(job); });
  return true;
}

}  // namespace sim_operators
