#include "sizer/loss_scale.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <utility>

namespace brimful {

Transaction::Keeper keeper_of(std::vector<at::Tensor> scaler_tensors) {
  struct Kept {
    std::vector<at::Tensor> tensors;
    std::vector<at::Tensor> copies;
  };
  auto kept = std::make_shared<Kept>();
  kept->tensors = std::move(scaler_tensors);
  for (const auto& tensor : kept->tensors) {
    kept->copies.push_back(at::empty_like(tensor));
  }
  const auto copy = [](const std::vector<at::Tensor>& from, std::vector<at::Tensor>& to) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) {
      to[i].copy_(from[i]);
    }
  };
  return {[kept, copy] { copy(kept->tensors, kept->copies); },
          [kept, copy] { copy(kept->copies, kept->tensors); }};
}

decltype(PieceWork::backward) scaled_backward(decltype(PieceWork::backward) backward,
                                              GradScaler* scaler) {
  if (scaler == nullptr || !scaler->enabled()) {
    return backward;
  }
  return [backward = std::move(backward), scaler](const at::Tensor& loss, const at::Tensor& seed) {
    backward(loss, scaler->scale(seed));
  };
}

}  // namespace brimful
