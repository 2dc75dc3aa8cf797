#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/step.h>
#include <brimful/step/transaction.h>
#include <c10/core/Event.h>

#include <optional>

namespace brimful {

/// The value of a 0-dim float32 tensor as it is now, without a wait for the work that is enqueued later.
class ValueOnHost {
 public:
  explicit ValueOnHost(const at::Tensor& value);
  /// Waits until the device has come to where the constructor was called.
  double get();

 private:
  at::Tensor copy_;
  std::optional<c10::Event> arrived_;
};

/// The scaler's state as a part of what a step restores; nothing for one that is not enabled.
Transaction::Keeper keeper_of(std::vector<at::Tensor> scaler_tensors);

/// The same backward from a seed times the scale; `scaler` may be null.
decltype(PieceWork::backward) scaled_backward(decltype(PieceWork::backward) backward,
                                              GradScaler* scaler);

}  // namespace brimful
