#include "reducer/gradient_view.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace brimful {
namespace {
struct History : torch::autograd::Function<History> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                            const at::Tensor& /*local*/, const at::Tensor& mean) {
    return mean.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};
}  // namespace

at::Tensor GradientView::over(const at::Tensor& place) {
  at::Tensor view(place.getIntrusivePtr()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true));
  given_ = view.getIntrusivePtr();
  return view;
}

void GradientView::let_go() {
  auto held = given_.lock();
  given_.reset();
  if (!held.defined()) {
    return;
  }
  at::Tensor kept(std::move(held));
  const at::NoGradGuard no_grad;
  kept.set_data(kept.detach().clone());
}

at::Tensor with_history_of(const at::Tensor& mean, const at::Tensor& local) {
  const at::AutoGradMode grad(true);
  return History::apply(local, mean);
}

}  // namespace brimful
