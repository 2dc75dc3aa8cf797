#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace brimful {

/// What a bucket sends in place of its gradients when they travel in another dtype: bfloat16 for float32 gradients, half
/// the bytes; or float32 for bfloat16 gradients, a sum without rounding on the way. With error feedback, what rounding
/// took from a gradient is added to the next one (Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et
/// al. 2019, "Error Feedback Fixes SignSGD", algorithm 1). The error is carried on only in decode(), so that an attempt
/// that is repeated leaves no trace. Buffers are allocated here, none later.
class Wire {
 public:
  /// `gradients`: a row of the bucket's dtype; its shape and device are all that is used.
  Wire(const at::Tensor& gradients, c10::ScalarType dtype, bool error_feedback);

  const at::Tensor& buffer() const { return buffer_; }
  /// buffer = gradients * scale, plus the error carried on. `gradients` stays as it is until decode().
  void encode(const at::Tensor& gradients, double scale);
  /// Carries on the error of the last encode times `carry`, then gradients = buffer * scale.
  void decode(const at::Tensor& gradients, double scale, double carry = 1);
  /// What rounding has taken so far, element by element as the gradients; undefined without error feedback.
  const at::Tensor& error() const { return error_; }
  /// Zeros to send, for a rank that cannot do its part.
  void clear();

 private:
  void carry_error(const at::Tensor& gradients, double scale);
  /// visit(begin, length) over the row: whole where there is no scratch.
  void in_parts(int64_t numel, const std::function<void(int64_t, int64_t)>& visit) const;

  at::Tensor buffer_;
  at::Tensor error_;  ///< undefined without error feedback
  at::Tensor
      scratch_;  ///< for one chunk, of the gradients' dtype, where kernels would allocate one
  double encoded_with_ = 1;
  bool encoded_ = false;  ///< in this attempt: a drained bucket has no error to carry
};

}  // namespace brimful
