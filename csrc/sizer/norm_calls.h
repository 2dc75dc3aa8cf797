#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <optional>
#include <vector>

namespace brimful::detail {

/// What a call of torch's batch_norm in training has found in its input, channel by channel.
struct NormCall {
  at::Tensor running_mean;  ///< its module's
  double count = 0;         ///< values of each channel
  double eps = 0;
  at::Tensor mean;
  at::Tensor inverse_deviation;  ///< 1 / sqrt(biased variance + eps)
};

/// Notes the calls of batch_norm in this thread while it lives. Those of compiled functions are not seen.
class NormCalls {
 public:
  NormCalls();
  ~NormCalls();
  NormCalls(const NormCalls&) = delete;
  NormCalls& operator=(const NormCalls&) = delete;

  const std::vector<NormCall>& all() const { return calls_; }

  /// False if a call has begun, and not ended: a thread may see its calls twice, by callbacks that it has from another.
  bool begin(NormCall call);
  /// Without `found` the call has failed.
  void end(const std::vector<c10::IValue>& found);

 private:
  NormCalls* outer_;
  at::CallbackHandle handle_;
  std::optional<NormCall> open_;
  std::vector<NormCall> calls_;
};

}  // namespace brimful::detail
