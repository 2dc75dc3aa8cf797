#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/participant.h>
#include <brimful/step/piece_work.h>

namespace brimful {

/// What losses are divided by in a step, alike on all ranks: a number, or one that lies on a device.
struct Divisor {
  double value = 1;
  at::Tensor late = {};  ///< defined: in its place (0-dim, float64)
  /// A number that differs where that does.
  double mark = 1;
};

/// Where a piece's backward begins: its weight, divided, in the loss's shape and dtype. Does not wait.
at::Tensor seed_of(const PieceLoss& piece, const Divisor& ref);

/// What a rank's pieces sum to, on a device where their values are. Does not wait.
class PieceSums {
 public:
  void add(const PieceLoss& piece);
  /// What this rank says of its step.
  Announcement said_with(ControlRecord record) const;
  /// Whether a piece's late weight was 0, and its loss not finite (0-dim, bool); undefined: none was late.
  const at::Tensor& doubtful() const { return doubtful_; }

 private:
  at::Tensor losses_;  ///< times weights
  double weight_ = 0;
  at::Tensor late_weight_;
  at::Tensor doubtful_;
};

}  // namespace brimful
