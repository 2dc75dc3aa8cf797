#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/step.h>
#include <brimful/step/transaction.h>

namespace brimful {

/// The scaler's state as a part of what a step restores; nothing for one that is not enabled.
Transaction::Keeper keeper_of(std::vector<at::Tensor> scaler_tensors);

/// The same backward from a seed times the scale; `scaler` may be null.
decltype(PieceWork::backward) scaled_backward(decltype(PieceWork::backward) backward,
                                              GradScaler* scaler);

}  // namespace brimful
