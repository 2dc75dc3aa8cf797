#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace brimful::pipeline {

/// The leaves of the graph of `outputs` that are not in `known`. Walks the whole graph.
std::vector<at::Tensor> unknown_leaves(const std::vector<at::Tensor>& outputs,
                                       const std::vector<const std::vector<at::Tensor>*>& known);

/// Whether a stage knows of all the parameters that it uses: a step that is undone empties the gradients of no others.
/// A leaf that a stage has made itself is none: it is another one in every microbatch, and so the second one shows it.
class KnownParameters {
 public:
  /// After each forward; walks the graphs of the first two.
  /// @throws c10::ValueError, which says how many others there are, and the shape of one
  void check(const std::vector<at::Tensor>& outputs,
             const std::vector<const std::vector<at::Tensor>*>& known, int stage);
  bool done() const { return checked_ == 2; }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<Weak> first_;
  int checked_ = 0;
};

}  // namespace brimful::pipeline
