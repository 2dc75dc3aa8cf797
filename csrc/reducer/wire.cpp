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

/// Whether all values of the gradients are values of the reduction dtype too.
bool widens(const at::Tensor& gradients, const at::Tensor& buffer) {
  return gradients.element_size() < buffer.element_size();
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
  if (gradients.is_cpu() && !own_loop(gradients, buffer_)) {
    scratch_ = at::empty({std::min(kChunkNumel, gradients.numel())}, gradients.options());
  }
}

// A CUDA kernel casts what it reads and writes, so that a whole row is one launch; the CPU's would allocate as much again.
void Wire::in_parts(int64_t numel, const std::function<void(int64_t, int64_t)>& visit) const {
  const auto most = scratch_.defined() ? scratch_.numel() : numel;
  for (int64_t begin = 0; begin < numel; begin += most) {
    visit(begin, std::min(most, numel - begin));
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
  if (!error_.defined() && (scale == 1 || widens(gradients, buffer_))) {
    buffer_.copy_(gradients);
    if (scale != 1) {
      buffer_.mul_(scale);
    }
    return;
  }
  // Rounded once, when all else is done.
  const auto factor = at::scalar_tensor(scale, at::TensorOptions().dtype(at::kDouble));
  in_parts(gradients.numel(), [&](int64_t begin, int64_t length) {
    const auto part = gradients.narrow(0, begin, length);
    const auto sent = buffer_.narrow(0, begin, length);
    auto out = scratch_.defined() ? scratch_.narrow(0, 0, length) : sent;
    if (error_.defined()) {
      at::add_out(out, error_.narrow(0, begin, length), part, scale);
    } else {
      at::mul_out(out, part, factor);
    }
    if (!out.is_same(sent)) {
      sent.copy_(out);
    }
  });
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
  // bfloat16 as by the loop above, other dtypes as torch's DistributedDataParallel does: in the one that travelled.
  const bool as_own_loop = buffer_.scalar_type() == at::kBFloat16 && !widens(gradients, buffer_);
  if (scale != 1 && !as_own_loop) {
    buffer_.mul_(scale);
  }
  gradients.copy_(buffer_);
  if (scale != 1 && as_own_loop) {
    gradients.mul_(scale);
  }
}

void Wire::clear() {
  buffer_.zero_();
  encoded_ = false;
}

// What was sent is rounded again rather than kept: the buffer holds the ranks' sum by now.
void Wire::carry_error(const at::Tensor& gradients, double scale) {
  if (widens(gradients, buffer_)) {
    return;  // nothing was taken
  }
  in_parts(gradients.numel(), [&](int64_t begin, int64_t length) {
    auto error = error_.narrow(0, begin, length);
    const auto part = gradients.narrow(0, begin, length);
    error.add_(part, encoded_with_);
    // In the place of the gradients, which decode() is about to overwrite.
    auto sent = part.view(buffer_.scalar_type()).narrow(0, 0, length);
    sent.copy_(error);
    if (scratch_.defined()) {
      const auto same = scratch_.narrow(0, 0, length);
      same.copy_(sent);
      sent = same;
    }
    error.sub_(sent);
    if (scale != 1) {
      error.mul_(scale);
    }
    at::nan_to_num_(error, 0.0, 0.0, 0.0);  // a gradient that was not finite leaves nothing behind
  });
}

}  // namespace brimful
