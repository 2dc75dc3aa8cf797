#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

namespace brimful {

/// What p.grad is while its values lie in a bucket: a tensor of its own over the parameter's place there. A program that
/// keeps the gradient of an earlier step (to combine several losses, say) finds it unchanged.
class GradientView {
 public:
  /// A new tensor over `place`; remembered, not owned.
  at::Tensor over(const at::Tensor& place);
  /// The place is about to get other values: what over() gave last, if the program still has it, gets memory of its own.
  void let_go();

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> given_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

/// The values of `mean` with the history of `local`, a gradient made under create_graph. A loss of p.grad then has, as the
/// mean over the ranks of what each rank derives from its own part, the right gradient.
at::Tensor with_history_of(const at::Tensor& mean, const at::Tensor& local);

}  // namespace brimful
