#pragma once
// How a Pipeline takes batches of any type that can be split; included by pipeline.h.
#include <brimful/pipeline/pipeline.h>
#include <brimful/sizer/split.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace brimful::pipeline {

namespace detail {
/// What a stage or a loss function gets of a piece: the tensors of Along and Shared.
template <typename T>
struct Bare {
  static T of(const T& part) { return part; }
};
template <typename T>
auto bare(const T& part) {
  return Bare<T>::of(part);
}
template <>
struct Bare<Along> {
  static at::Tensor of(const Along& part) { return part.tensor; }
};
template <typename T>
struct Bare<Shared<T>> {
  static auto of(const Shared<T>& part) { return bare(part.value); }
};
template <>
struct Bare<std::vector<Along>> {
  static std::vector<at::Tensor> of(const std::vector<Along>& parts) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(parts.size());
    for (const auto& part : parts) {
      tensors.push_back(part.tensor);
    }
    return tensors;
  }
};
template <typename A, typename B>
struct Bare<std::pair<A, B>> {
  static auto of(const std::pair<A, B>& parts) {
    return std::pair(bare(parts.first), bare(parts.second));
  }
};
template <typename... T>
struct Bare<std::tuple<T...>> {
  static auto of(const std::tuple<T...>& parts) {
    return std::apply([](const T&... part) { return std::tuple(bare(part)...); }, parts);
  }
};

template <typename T>
Value value_of_piece(const T& piece) {
  return value_of(bare(piece));
}
template <typename... T>
Value value_of_piece(const std::variant<T...>& piece) {
  return std::visit([](const auto& part) { return value_of_piece(part); }, piece);
}

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

/// For a step that is repeated.
template <typename T>
void add_tensors(const T& part, std::vector<NamedTensor>& tensors) {
  for (auto& named : brimful::detail::tensors_of(part)) {
    tensors.push_back(std::move(named));
  }
}

/// Input and keywords of a batch, which outlives it.
template <typename Batch, typename Named>
PipelineWork work_of(const Batch& batch, const Named& keywords, int64_t rows) {
  PipelineWork work;
  add_tensors(batch, work.reused);
  work.input = [&batch](int, int64_t begin, int64_t end) {
    return value_of_piece(slice_rows(batch, begin, end));
  };
  if constexpr (!std::is_same_v<Named, NoKeywords>) {
    for (const auto& [name, value] : keywords) {
      brimful::detail::RowEvidence of_keyword;
      brimful::detail::count_part(value, of_keyword);
      TORCH_CHECK_VALUE(!of_keyword.rows || *of_keyword.rows == rows,
                        "batch and keyword disagree in size (keyword: ", name, ", rows: ", rows,
                        " and ", of_keyword.rows.value_or(0), "); give both the same number");
      of_keyword.rows = rows;
      brimful::detail::decide_rows(of_keyword);
      add_tensors(value, work.reused);
    }
    work.keywords = [&keywords, rows](int, int64_t begin, int64_t end) {
      Keywords piece;
      for (const auto& [name, value] : keywords) {
        piece.emplace(name, value_of_piece(brimful::detail::slice_part(value, {rows, begin, end})));
      }
      return piece;
    };
  }
  return work;
}
}  // namespace detail

template <typename Batch, typename Target, typename LossFn, typename Named>
Outcome Pipeline::step(const Batch& batch, const Target& target, const LossFn& loss_fn,
                       const Named& keywords) {
  const auto rows = rows_of(batch);
  auto work = detail::work_of(batch, keywords, rows);
  detail::add_tensors(target, work.reused);
  work.loss = [&](int, int64_t begin, int64_t end, const Value& output) {
    return detail::loss_of(loss_fn, output, detail::bare(slice_rows(target, begin, end)),
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
