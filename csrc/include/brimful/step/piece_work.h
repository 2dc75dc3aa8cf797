#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/kept_batch.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace brimful {

/// The loss of one piece: its mean over `weight`.
struct PieceLoss {
  at::Tensor loss;
  double weight = 0;
  /// Defined: in place of `weight` (one element, on the loss's CUDA device). A sizer's step over the CPU's gradients, or one whose
  /// ranks' records ride in a bucket, waits for it. Others do not read it: a piece of weight 0 runs backward too, and what is wrong
  /// with a weight is found in a later step.
  at::Tensor late_weight = {};
};

/// Reads a weight that is late, which waits for its device.
/// @throws c10::ValueError unless it has one element
BRIMFUL_API PieceLoss with_known_weight(PieceLoss piece);

/// @throws c10::TypeError without a tensor; c10::ValueError unless it is a scalar that needs a gradient, and the weight is
/// finite and not negative, as far as it is known
BRIMFUL_API void require_loss(const PieceLoss& piece);

/// The user's work in a step, on rows [begin, end) of this rank's batch.
struct PieceWork {
  std::function<PieceLoss(int64_t begin, int64_t end)> forward;
  /// Runs the backward of `loss` with `gradient` as its seed.
  std::function<void(const at::Tensor& loss, const at::Tensor& gradient)> backward;
  /// The batch's tensors in these rows, or views of them, which forward may change in place. Optional: without it such a
  /// change is not undone when rows are run again.
  std::function<std::vector<NamedTensor>(int64_t begin, int64_t end)> tensors = {};
};

}  // namespace brimful
