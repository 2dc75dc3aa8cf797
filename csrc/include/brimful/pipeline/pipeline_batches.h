#pragma once
// How a Pipeline takes batches of any type that can be split; included by pipeline.h.
#include <brimful/pipeline/pipeline.h>
#include <brimful/sizer/split.h>

#include <type_traits>
#include <vector>

namespace brimful::pipeline {

namespace detail {
template <typename LossFn, typename Target>
PieceLoss loss_of(const LossFn& loss_fn, const Value& output, const Target& target, double rows) {
  const auto as_piece = [&](auto result) -> PieceLoss {
    if constexpr (std::is_same_v<decltype(result), PieceLoss>) {
      return result;
    } else {
      return {result, rows};
    }
  };
  if constexpr (std::is_invocable_v<const LossFn&, at::Tensor, Target>) {
    TORCH_CHECK_TYPE(
        output.tensors.size() == 1,
        "the loss function takes one tensor, but the last stage gives another number (",
        shapes_of(output.tensors), ")");
    return as_piece(loss_fn(output.tensors[0], target));
  } else if constexpr (std::is_invocable_v<const LossFn&, std::vector<at::Tensor>, Target>) {
    return as_piece(loss_fn(output.tensors, target));
  } else {
    return as_piece(loss_fn(output, target));
  }
}

/// Input and keywords of a batch, which outlives it.
template <typename Batch, typename Named>
PipelineWork work_of(const Batch& batch, const Named& keywords, int64_t rows) {
  PipelineWork work;
  work.input = [&batch](int, int64_t begin, int64_t end) {
    return value_of(slice_rows(batch, begin, end));
  };
  if constexpr (!std::is_same_v<Named, NoKeywords>) {
    for (const auto& [name, value] : keywords) {
      brimful::detail::Rows of_keyword;
      brimful::detail::count_part(value, of_keyword);
      TORCH_CHECK_VALUE(!of_keyword || *of_keyword == rows,
                        "batch and keyword disagree in size (keyword: ", name, ", rows: ", rows,
                        " and ", of_keyword.value_or(0), "); give both the same number");
    }
    work.keywords = [&keywords, rows](int, int64_t begin, int64_t end) {
      Keywords piece;
      for (const auto& [name, value] : keywords) {
        piece.emplace(name, value_of(brimful::detail::slice_part(value, {rows, begin, end})));
      }
      return piece;
    };
  }
  return work;
}
}  // namespace detail

template <typename Batch, typename Target, typename LossFn, typename Named>
PipelineOutcome Pipeline::step(const Batch& batch, const Target& target, const LossFn& loss_fn,
                               const Named& keywords) {
  const auto rows = rows_of(batch);
  auto work = detail::work_of(batch, keywords, rows);
  work.loss = [&](int, int64_t begin, int64_t end, const Value& output) {
    return detail::loss_of(loss_fn, output, slice_rows(target, begin, end),
                           static_cast<double>(end - begin));
  };
  TORCH_CHECK_VALUE(rows_of(target) == rows, "batch and target disagree in size (rows: ", rows,
                    " and ", rows_of(target), "); give both the same number");
  return step(rows, work);
}

template <typename Batch, typename Named>
Value Pipeline::forward(const Batch& batch, const Named& keywords) {
  const auto rows = rows_of(batch);
  return forward(rows, detail::work_of(batch, keywords, rows));
}

}  // namespace brimful::pipeline
