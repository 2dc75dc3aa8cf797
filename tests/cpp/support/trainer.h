#pragma once
#include "support/net.h"

#include <brimful/reducer/distributed_data_parallel.h>
#include <brimful/sizer/batch_sizer.h>

#include <chrono>
#include <optional>

namespace brimful::test {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Clock = std::chrono::steady_clock;

/// So small that nearly every parameter of a Net is a bucket of its own.
inline ReducerOptions tiny_buckets() {
  ReducerOptions options;
  options.bucket_cap_mb = options.first_bucket_cap_mb = 24.0 / (1 << 20);
  return options;
}

struct Batch {
  at::Tensor data;
  at::Tensor target;
};

/// Different on every rank and in every step.
inline Batch batch_of(int rank, int64_t step, int64_t rows, c10::ScalarType dtype = at::kFloat) {
  const double salt = 10.0 * rank + static_cast<double>(step);
  return {filled({rows, Net::kInputs}, salt, dtype), filled({rows, 1}, salt + 5, dtype)};
}

inline StepInput input_of(int64_t rows, std::optional<std::vector<int64_t>> split = {}) {
  StepInput input;
  input.rows = rows;
  input.split = std::move(split);
  return input;
}

inline void run_backward(const at::Tensor& loss, const at::Tensor& gradient) {
  loss.backward(gradient);
}

/// One rank's training with a sizer.
class Trainer {
 public:
  explicit Trainer(const Group& group, std::shared_ptr<Net> net = std::make_shared<Net>(),
                   BatchSizerOptions options = {}, const ReducerOptions& reducer = tiny_buckets())
      : model(std::move(net), group, reducer),
        sizer(StepGroup({model.reducer()}, {}),
              Transaction(model->buffers(), {c10::Device(c10::DeviceType::CPU)}),
              std::move(options)) {}

  PieceWork work(const std::optional<Batch>& batch) {
    return {[this, batch](int64_t begin, int64_t end) {
              auto& fault = *model->fault;
              fault.current_piece = begin == 0 ? 0 : fault.current_piece + 1;
              const auto x = watched_input(slice_rows(batch->data, begin, end), model->fault);
              const auto y = slice_rows(batch->target, begin, end);
              return PieceLoss{at::mse_loss(model(x), y), static_cast<double>(end - begin)};
            },
            run_backward};
  }

  /// The gradients of one step.
  Outcome fill(const std::optional<Batch>& batch, std::optional<std::vector<int64_t>> split = {}) {
    const auto input = batch ? input_of(batch->data.size(0), std::move(split)) : StepInput{};
    return sizer.step(input, work(batch));
  }
  Outcome step(const std::optional<Batch>& batch, std::optional<std::vector<int64_t>> split = {}) {
    auto outcome = fill(batch, std::move(split));
    model->update();
    return outcome;
  }

  /// Parameters and buffers.
  std::vector<at::Tensor> state() {
    auto tensors = model->parameters();
    tensors.insert(tensors.end(), model->buffers().begin(), model->buffers().end());
    return copies(tensors);
  }

  DistributedDataParallel<Net> model;
  BatchSizer sizer;
};

/// What a rank's call ended with.
struct Caught {
  enum class Type {
    nothing,
    rank_out_of_memory,
    rank_failed,
    batch_too_large,
    out_of_memory,
    value_error,
    type_error,
    runtime_error,
    other
  };
  Type type = Type::nothing;
  std::string text;
  int rank = -2;  // of a RankFailed
  double seconds = 0;
};

template <typename Fn>
Caught catching(const Fn& fn) {
  using Type = Caught::Type;
  Caught caught;
  const auto begin = Clock::now();
  const auto set = [&](Type type, const std::string& text, int rank = -2) {
    caught.type = type;
    caught.text = text;
    caught.rank = rank;
  };
  try {
    fn();
  } catch (const RankOutOfMemory& e) {
    set(Type::rank_out_of_memory, e.what_without_backtrace(), e.rank());
  } catch (const RankFailed& e) {
    set(Type::rank_failed, e.what_without_backtrace(), e.rank());
  } catch (const BatchTooLarge& e) {
    set(Type::batch_too_large, e.what_without_backtrace());
  } catch (const c10::OutOfMemoryError& e) {
    set(Type::out_of_memory, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    set(Type::value_error, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    set(Type::type_error, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    set(Type::other, e.what_without_backtrace());
  } catch (const std::runtime_error& e) {
    set(Type::runtime_error, e.what());
  } catch (const std::exception& e) {
    set(Type::other, e.what());
  }
  caught.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return caught;
}

}  // namespace brimful::test
