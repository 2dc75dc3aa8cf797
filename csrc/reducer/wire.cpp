#include "reducer/wire.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "reducer/scaled_copy.h"

namespace brimful {
namespace {
constexpr int64_t kChunkNumel = int64_t{1} << 18;

bool own_loop(const at::Tensor& gradients, const at::Tensor& buffer) {
  return gradients.is_cpu() && gradients.scalar_type() == at::kFloat &&
         buffer.scalar_type() == at::kBFloat16;
}

uint16_t* bits(const at::Tensor& buffer) {
  return static_cast<uint16_t*>(buffer.mutable_data_ptr());
}
}  // namespace

Wire::Wire(const at::Tensor& gradients, c10::ScalarType dtype, bool error_feedback)
    : buffer_(at::zeros_like(gradients, gradients.options().dtype(dtype))) {
  if (error_feedback) {
    error_ = at::zeros_like(gradients);
  }
  if (!own_loop(gradients, buffer_)) {
    scratch_ = at::empty({std::min(kChunkNumel, gradients.numel())}, gradients.options());
  }
}

void Wire::encode(const at::Tensor& gradients, double scale) {
  const at::NoGradGuard no_grad;
  encoded_with_ = scale;
  encoded_ = true;
  if (own_loop(gradients, buffer_)) {
    const auto* from = gradients.const_data_ptr<float>();
    const auto factor = static_cast<float>(scale);
    if (error_.defined()) {
      to_bfloat16(bits(buffer_), from, error_.const_data_ptr<float>(), gradients.numel(), factor);
    } else {
      to_bfloat16(bits(buffer_), from, gradients.numel(), factor);
    }
    return;
  }
  if (!error_.defined()) {
    buffer_.copy_(gradients);
    if (scale != 1) {
      buffer_.mul_(scale);
    }
    return;
  }
  for (int64_t begin = 0; begin < gradients.numel(); begin += kChunkNumel) {
    const auto length = std::min(kChunkNumel, gradients.numel() - begin);
    auto sum = scratch_.narrow(0, 0, length);
    at::add_out(sum, error_.narrow(0, begin, length), gradients.narrow(0, begin, length), scale);
    buffer_.narrow(0, begin, length).copy_(sum);
  }
}

void Wire::decode(const at::Tensor& gradients, double scale, double carry) {
  const at::NoGradGuard no_grad;
  const bool carries = std::exchange(encoded_, false) && error_.defined();
  if (own_loop(gradients, buffer_)) {
    auto* to = gradients.mutable_data_ptr<float>();
    const auto factor = static_cast<float>(scale);
    if (carries) {
      from_bfloat16(to, bits(buffer_), error_.mutable_data_ptr<float>(), gradients.numel(), factor,
                    static_cast<float>(encoded_with_), static_cast<float>(carry));
    } else {
      from_bfloat16(to, bits(buffer_), gradients.numel(), factor);
    }
    return;
  }
  if (carries) {
    carry_error(gradients, carry);
  }
  if (scale != 1) {
    buffer_.mul_(scale);
  }
  gradients.copy_(buffer_);
}

void Wire::clear() {
  buffer_.zero_();
  encoded_ = false;
}

// What was sent is rounded again rather than kept: the buffer holds the ranks' sum by now.
void Wire::carry_error(const at::Tensor& gradients, double scale) {
  for (int64_t begin = 0; begin < gradients.numel(); begin += kChunkNumel) {
    const auto length = std::min(kChunkNumel, gradients.numel() - begin);
    auto error = error_.narrow(0, begin, length);
    error.add_(gradients.narrow(0, begin, length), encoded_with_);
    auto sent = scratch_.narrow(0, 0, length);
    sent.copy_(error.to(buffer_.scalar_type()));
    error.sub_(sent);
    if (scale != 1) {
      error.mul_(scale);
    }
    at::nan_to_num_(error, 0.0, 0.0, 0.0);  // a gradient that was not finite leaves nothing behind
  }
}

}  // namespace brimful
