#include "sizer/norm_calls.h"

#include <cstring>
#include <memory>
#include <utility>

namespace brimful::detail {
namespace {

// What at::batch_norm calls on every device; it returns what it has found as well.
constexpr const char* kBatchNorm = "aten::_batch_norm_impl_index";
enum Argument : size_t { kInput = 0, kRunningMean = 3, kTraining = 5, kEps = 7, kArguments = 9 };
enum Result : size_t { kMean = 1, kInverseDeviation = 2, kResults = 5 };

// Of this thread, whatever state it has from another one.
thread_local NormCalls* innermost = nullptr;

struct Begun : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  if (innermost == nullptr || std::strcmp(function.name(), kBatchNorm) != 0) {
    return nullptr;
  }
  const auto inputs = function.inputs();
  if (inputs.size() != kArguments || !inputs[kTraining].toBool() ||
      !inputs[kRunningMean].isTensor()) {
    return nullptr;
  }
  const auto& input = inputs[kInput].toTensor();
  if (input.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {  // a compiler looks at the model
    return nullptr;
  }
  NormCall call;
  call.running_mean = inputs[kRunningMean].toTensor();
  call.count = static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
  call.eps = inputs[kEps].toDouble();
  return innermost->begin(std::move(call)) ? std::make_unique<Begun>() : nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* begun) {
  if (begun != nullptr) {
    innermost->end(function.outputs());
  }
}
}  // namespace

bool NormCalls::begin(NormCall call) {
  if (open_) {
    return false;
  }
  open_ = std::move(call);
  return true;
}

void NormCalls::end(const std::vector<c10::IValue>& found) {
  if (found.size() == kResults) {
    open_->mean = found[kMean].toTensor();
    open_->inverse_deviation = found[kInverseDeviation].toTensor();
    calls_.push_back(std::move(*open_));
  }
  open_.reset();
}

NormCalls::NormCalls()
    : outer_(std::exchange(innermost, this)),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {}

NormCalls::~NormCalls() {
  at::removeCallback(handle_);
  innermost = outer_;
}

}  // namespace brimful::detail
