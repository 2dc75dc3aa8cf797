#pragma once
// The templates of BatchSizer; included by batch_sizer.h.
#include <brimful/log.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/split.h>

#include <exception>
#include <optional>
#include <string>
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
      TORCH_CHECK_VALUE(
          false,
          "a rank without data cannot take part in the model's own collectives (lockstep: true)");
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
    return step(input, brimful::detail::work_of(batch, loss_fn));
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

/// A loop over `loader` that looks one batch ahead, so that every rank knows which others have more.
template <typename Loader>
class Batches {
 public:
  using Batch = std::decay_t<decltype(*std::declval<Loader&>().begin())>;

  Batches(BatchSizer& sizer, Loader& loader) : sizer_(sizer), loader_(loader) {}
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;
  /// If an exception leaves the loop's body between two steps, the other ranks raise in their next one.
  ~Batches() {
    if (std::uncaught_exceptions() > exceptions_ && sizer_.expects_step()) {
      sizer_.tell_failure(FailureKind::error,
                          "an exception ended its loop (see that rank's own output)");
    }
  }

  struct End {};
  class Iterator {
   public:
    explicit Iterator(Batches& loop) : loop_(loop) {}
    std::optional<Batch>& operator*() { return loop_.current_; }
    Iterator& operator++() {
      loop_.advance();
      return *this;
    }
    bool operator==(End /*end*/) const { return loop_.done_; }

   private:
    Batches& loop_;
  };

  Iterator begin() {
    position_.emplace(loader_.begin());
    std::exception_ptr error;
    try {
      fetch();
    } catch (...) {
      error = std::current_exception();
    }
    const bool any = sizer_.begin_loop(next_ || error ? Next::yes : Next::no, input());
    if (error) {
      sizer_.announce_failure(FailureKind::error, describe(error));
      std::rethrow_exception(error);
    }
    done_ = !any;
    if (any) {
      turn();
    }
    return Iterator(*this);
  }
  End end() const { return {}; }

 private:
  StepInput input() const { return next_ ? BatchSizer::input_of(*next_) : StepInput{}; }

  void fetch() {
    next_.reset();
    if (*position_ != loader_.end()) {
      next_.emplace(**position_);
      ++*position_;
    }
  }

  void turn() {
    current_ = std::move(next_);
    try {
      fetch();
    } catch (...) {
      sizer_.announce_failure(FailureKind::error, describe(std::current_exception()));
      throw;
    }
    sizer_.announce_next(next_ ? Next::yes : Next::no, input());
    calls_ = sizer_.calls();
  }

  void advance() {
    TORCH_CHECK(sizer_.calls() > calls_, "a batch was left out (steps: ", sizer_.steps(),
                "); call sizer.step for every batch of the loop");
    done_ = sizer_.at_end();
    if (!done_) {
      turn();
    }
  }

  BatchSizer& sizer_;
  Loader& loader_;
  std::optional<std::decay_t<decltype(std::declval<Loader&>().begin())>> position_;
  std::optional<Batch> current_;
  std::optional<Batch> next_;
  int64_t calls_ = 0;
  bool done_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

template <typename Loader>
Batches<Loader> BatchSizer::batches(Loader& loader) {
  return Batches<Loader>(*this, loader);
}

}  // namespace brimful
