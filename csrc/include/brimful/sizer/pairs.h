#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/sizer/split.h>
#include <brimful/step/kept_batch.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <vector>

namespace brimful {

/// Embeddings by tower, such as image and text: tensors with a row for each row of the batch.
using Towers = std::vector<at::Tensor>;

/// This rank's rows among those of all ranks.
struct OwnRows {
  int64_t begin = 0;
  int64_t end = 0;
};

struct PairOptions {
  /// Add to the gradients that there are; else they must be empty. Keeps a copy of them during the step.
  bool accumulate = false;
  /// The loss is the mean over this rank's own rows, each beside the rows of all ranks. Else it is one function of all
  /// rows, the same on every rank.
  bool own = false;
  /// With `own`: what the other ranks' losses say of this rank's rows is added, by one more collective. Without it the
  /// others' rows are constants, and the sum of the ranks' gradients is that of no loss.
  bool gathered_gradient = true;
};

/// The user's work in a step over pairs of rows.
struct PairWork {
  /// Embeddings of rows [begin, end) of this rank's batch; called twice for each piece, first without grad mode.
  std::function<Towers(int64_t begin, int64_t end)> embed;
  /// Scalars, which are added, from the embeddings of all rows of all ranks.
  std::function<std::vector<at::Tensor>(const Towers& all, OwnRows own)> loss;
  /// As PieceWork's.
  std::function<void(const at::Tensor& loss, const at::Tensor& gradient)> backward;
  std::function<std::vector<NamedTensor>(int64_t begin, int64_t end)> tensors = {};
  /// Gradients of `loss` with respect to `inputs`, undefined where there is none. Optional.
  std::function<std::vector<at::Tensor>(const at::Tensor& loss, const at::Tensor& seed,
                                        const std::vector<at::Tensor>& inputs)>
      differentiate = {};
  PairOptions options = {};
};

namespace detail {
template <typename T>
std::vector<at::Tensor> as_tensors(T&& returned) {
  if constexpr (std::convertible_to<T, at::Tensor>) {
    return {at::Tensor(std::forward<T>(returned))};
  } else {
    std::vector<at::Tensor> tensors;
    visit_part(returned, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    return tensors;
  }
}

/// Refers to all arguments.
template <typename Batch, typename EmbedFn, typename PairLoss>
PairWork pair_work_of(const Batch& batch, const EmbedFn& embed_fn, const PairLoss& pair_loss) {
  PairWork work;
  work.embed = [&](int64_t begin, int64_t end) {
    return as_tensors(embed_fn(slice_rows(batch, begin, end)));
  };
  work.loss = [&](const Towers& all, OwnRows own) {
    if constexpr (std::invocable<const PairLoss&, const Towers&, OwnRows>) {
      return as_tensors(pair_loss(all, own));
    } else {
      return as_tensors(pair_loss(all));
    }
  };
  work.backward = [](const at::Tensor& loss, const at::Tensor& gradient) {
    loss.backward(gradient);
  };
  work.tensors = [&](int64_t begin, int64_t end) { return tensors_of(batch, begin, end); };
  return work;
}
}  // namespace detail

}  // namespace brimful
