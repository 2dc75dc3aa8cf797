#pragma once
// How a BatchSizer takes batches of any type that can be split; included by batch_sizer.h.
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/split.h>

#include <optional>
#include <type_traits>
#include <utility>

namespace brimful {
namespace detail {
template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

inline PieceLoss as_piece_loss(const at::Tensor& loss, int64_t rows) {
  return {loss, static_cast<double>(rows)};
}
inline PieceLoss as_piece_loss(PieceLoss loss, int64_t /*rows*/) {
  return loss;
}

/// Refers to both arguments.
template <typename Batch, typename LossFn>
PieceWork work_of(const Batch& batch, const LossFn& loss_fn) {
  PieceWork work;
  work.forward = [&](int64_t begin, int64_t end) {
    return as_piece_loss(loss_fn(slice_rows(batch, begin, end)), end - begin);
  };
  work.backward = [](const at::Tensor& loss, const at::Tensor& gradient) {
    loss.backward(gradient);
  };
  work.tensors = [&](int64_t begin, int64_t end) { return tensors_of(batch, begin, end); };
  return work;
}

template <typename Model>
Transaction transaction_of(Model& model) {
  Transaction transaction({}, {model.reducer()->parameters().front().device()});
  transaction.follow([module = model.module()] { return module->buffers(); });
  return transaction;
}

template <typename Model>
BatchSizerOptions options_for(Model& model, BatchSizerOptions options) {
  auto parameters = model.reducer()->parameters();
  options.device = parameters.front().device();
  if (!options.standing_bytes) {
    if constexpr (requires { model.module()->parameters(); }) {
      parameters = model.module()->parameters();
    }
    options.standing_bytes = [parameters, buffers = model.module()->buffers(),
                              device = options.device] {
      return standing_bytes(parameters, buffers, device);
    };
  }
  return options;
}
}  // namespace detail

template <typename Model>
requires requires(Model& model) {
  model.reducer()->parameters();
  model.module()->buffers();
}
BatchSizer::BatchSizer(Model& model, BatchSizerOptions options)
    : BatchSizer(StepGroup({model.reducer()}, {}), brimful::detail::transaction_of(model),
                 brimful::detail::options_for(model, std::move(options))) {}

template <typename Batch, typename LossFn>
Outcome BatchSizer::step(const Batch& batch, const LossFn& loss_fn, StepOptions options) {
  if constexpr (brimful::detail::IsOptional<Batch>::value) {
    if (batch) {
      return step(*batch, loss_fn, options);
    }
    PieceWork none;
    none.forward = [](int64_t, int64_t) -> PieceLoss {
      TORCH_CHECK_VALUE(false,
                        "a rank without data cannot take part in the model's own collectives "
                        "(lockstep: true); give all ranks the same number of batches");
    };
    StepInput input;
    input.accumulate = options.accumulate;
    return step(input, none);
  } else {
    auto input = input_of(batch);
    input.accumulate = options.accumulate;
    if (!input.error && predicts()) {
      input.kind = kind_of(batch);
    }
    input.ask_kind = [&batch] { return kind_of(batch); };
    return step(input, brimful::detail::work_of(batch, loss_fn));
  }
}

template <typename Batch, typename EmbedFn, typename PairLoss>
Outcome BatchSizer::step_pairs(const Batch& batch, const EmbedFn& embed_fn,
                               const PairLoss& pair_loss, PairOptions options) {
  if constexpr (brimful::detail::IsOptional<Batch>::value) {
    if (batch) {
      return step_pairs(*batch, embed_fn, pair_loss, options);
    }
    PairWork none;
    none.options = options;
    return step_pairs(StepInput{}, none);
  } else {
    auto input = input_of(batch);
    input.ask_kind = [&batch] { return kind_of(batch); };
    auto work = brimful::detail::pair_work_of(batch, embed_fn, pair_loss);
    work.options = options;
    return step_pairs(input, work);
  }
}

template <typename Batch, typename LossFn>
std::optional<Plan> BatchSizer::plan(const Batch& batch, const LossFn& loss_fn) {
  auto input = input_of(batch);
  if (!input.error) {
    input.kind = kind_of(batch);
  }
  return plan(input, brimful::detail::work_of(batch, loss_fn));
}

}  // namespace brimful
