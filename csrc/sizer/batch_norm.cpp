#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>

#include "sizer/norm_calls.h"
#include "step/copy_each.h"

namespace brimful {
namespace {
constexpr size_t kNamed = 8;  // modules in a message

bool couples_rows(const BatchNormState& state) {
  return state.training || !state.tracks;
}

bool updates_statistics(const BatchNormState& state) {
  return state.training && state.tracks;
}

double momentum_of_piece(double momentum, int64_t pieces) {
  return -std::expm1(std::log1p(-momentum) / static_cast<double>(pieces));
}

}  // namespace

/// What modules' buffers are to be, all at once. Without a trace in the version, as batch_norm itself does: graphs that are
/// still there hold the buffers.
class detail::NormPuts {
 public:
  void add(const at::Tensor& buffer, const at::Tensor& value) {
    if (buffer.defined()) {
      buffers_.push_back(buffer.variable_data());
      values_.push_back(value);
    }
  }
  void run() const { copy_each(buffers_, values_); }

 private:
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> values_;
};

BatchNormPolicy batch_norm_policy(const std::string& name) {
  if (name == "warn") {
    return BatchNormPolicy::warn;
  }
  if (name == "freeze") {
    return BatchNormPolicy::freeze;
  }
  if (name == "rescale") {
    return BatchNormPolicy::rescale;
  }
  TORCH_CHECK_VALUE(name == "refuse", "there is no such policy for BatchNorm (batch_norm: ", name,
                    "); pass \"warn\", \"freeze\", \"rescale\" or \"refuse\"");
  return BatchNormPolicy::refuse;
}

BatchNorms::BatchNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules)
    : policy_(policy), modules_(std::move(modules)) {}

std::string BatchNorms::names() const {
  std::string text;
  size_t count = 0;
  for (const auto& module : modules_) {
    if (couples_rows(module.state()) && ++count <= kNamed) {
      text += (text.empty() ? "" : ", ") + module.name;
    }
  }
  return count > kNamed ? text + " and " + std::to_string(count - kNamed) + " more" : text;
}

bool BatchNorms::may_split() const {
  return policy_ != BatchNormPolicy::refuse ||
         std::none_of(modules_.begin(), modules_.end(),
                      [](const auto& module) { return couples_rows(module.state()); });
}

void BatchNorms::require_whole(int64_t pieces) const {
  TORCH_CHECK_VALUE(pieces <= 1 || may_split(),
                    "this model's batches must not be split (batch_norm: refuse, pieces: ", pieces,
                    ", BatchNorm modules: ", names(),
                    "); give the device more memory, use GroupNorm, or choose another batch_norm");
}

void BatchNorms::warn() {
  if (warned_) {
    return;
  }
  const auto coupled = names();
  if (coupled.empty()) {
    return;
  }
  warned_ = true;
  log(LogLevel::warning,
      "the batch is split, and BatchNorm normalises every piece by itself: the result depends on "
      "the split (modules: " +
          coupled +
          "); use GroupNorm, or batch_norm=\"refuse\" where the batch fits whole; \"rescale\" and "
          "\"freeze\" change the running statistics only");
}

void BatchNorms::hold() {
  const memory::Unlimited unlimited;
  for (const auto& module : modules_) {
    const auto state = module.state();
    if (!updates_statistics(state)) {
      continue;
    }
    Held held{&module, state, module.buffers(), {}, 0, {}};
    if (policy_ == BatchNormPolicy::rescale) {
      const auto& batches = held.buffers.batches;
      held.seen = state.momentum || !batches.defined() ? 0 : batches.item<double>();
    }
    held_.push_back(std::move(held));
  }
  if (policy_ == BatchNormPolicy::rescale) {
    copy_buffers();
  }
}

void BatchNorms::copy_buffers() {
  std::vector<at::Tensor> copies;
  std::vector<at::Tensor> buffers;
  const auto copy = [&](const at::Tensor& buffer) {
    if (!buffer.defined()) {
      return buffer;
    }
    buffers.push_back(buffer);
    return copies.emplace_back(at::empty_like(buffer));
  };
  for (auto& held : held_) {
    held.copies = {copy(held.buffers.mean), copy(held.buffers.variance),
                   copy(held.buffers.batches)};
  }
  copy_each(copies, buffers);
}

void BatchNorms::change(const Held& held, int64_t piece, int64_t pieces) {
  auto momentum = held.before.momentum;
  if (!momentum) {
    const auto k = static_cast<double>(pieces);
    momentum = 1 / (k * held.seen + static_cast<double>(piece) + 1);
  } else if (*momentum >= 0 && *momentum <= 1) {
    momentum = momentum_of_piece(*momentum, pieces);
  }
  held.module->set_momentum(momentum);
}

std::shared_ptr<detail::NormCalls> BatchNorms::before_piece(int64_t piece, int64_t pieces) {
  if (pieces < 2 || modules_.empty()) {
    return nullptr;
  }
  if (policy_ == BatchNormPolicy::warn) {
    warn();
    return nullptr;
  }
  if (policy_ == BatchNormPolicy::refuse) {
    return nullptr;
  }
  const at::NoGradGuard no_grad;
  if (piece == 0) {
    after_step();
    hold();
  }
  if (policy_ == BatchNormPolicy::freeze || held_.empty()) {
    return nullptr;
  }
  detail::NormPuts puts;
  for (const auto& held : held_) {
    if (piece > 0) {
      puts.add(held.buffers.batches, held.copies.batches);  // the last piece counts for the step
    }
    change(held, piece, pieces);
  }
  puts.run();
  return std::make_shared<detail::NormCalls>();
}

void BatchNorms::after_piece(int64_t piece, const detail::NormCalls* calls) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  if (calls != nullptr) {
    note(*calls);
  } else if (piece == 0) {
    copy_buffers();
  }
}

void BatchNorms::note(const detail::NormCalls& calls) {
  for (auto& held : held_) {
    size_t nth = 0;
    for (const auto& call : calls.all()) {
      if (!call.running_mean.is_same(held.buffers.mean)) {
        continue;
      }
      const auto dtype = held.buffers.mean.scalar_type();
      const auto variance = call.inverse_deviation.to(dtype).pow(-2).sub_(call.eps).clamp_min_(0);
      if (++nth > held.calls.size()) {
        held.calls.emplace_back();
      }
      add(held.calls[nth - 1], {call.count, call.mean.to(dtype), variance * call.count});
    }
  }
}

// By Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
void BatchNorms::add(Moments& moments, Moments piece) {
  if (moments.count == 0) {
    moments = std::move(piece);
    return;
  }
  const double count = moments.count + piece.count;
  const auto apart = piece.mean - moments.mean;
  moments.squares.add_(piece.squares).addcmul_(apart, apart, moments.count * piece.count / count);
  moments.mean = moments.mean.add(apart, piece.count / count);
  moments.count = count;
}

void BatchNorms::write(const Held& held, detail::NormPuts& puts) {
  auto mean = held.copies.mean;
  auto variance = held.copies.variance;
  double seen = held.seen;
  for (const auto& call : held.calls) {
    const double share = held.before.momentum.value_or(1 / ++seen);
    mean = mean.lerp(call.mean, share);
    variance = variance.lerp(call.squares / (call.count - 1), share);
  }
  puts.add(held.buffers.mean, mean);
  puts.add(held.buffers.variance, variance);
  if (held.buffers.batches.defined()) {
    puts.add(held.buffers.batches, held.copies.batches + std::ssize(held.calls));
  }
}

void BatchNorms::finish() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  detail::NormPuts puts;
  for (const auto& held : held_) {
    if (policy_ == BatchNormPolicy::freeze) {
      puts.add(held.buffers.mean, held.copies.mean);
      puts.add(held.buffers.variance, held.copies.variance);
      puts.add(held.buffers.batches, held.copies.batches);
    } else if (!held.calls.empty()) {
      write(held, puts);
    }
  }
  puts.run();
}

void BatchNorms::after_step() noexcept {
  for (const auto& held : held_) {
    try {
      held.module->set_momentum(held.before.momentum);
    } catch (...) {
      log(LogLevel::error, "a BatchNorm module's momentum could not be put back (module: " +
                               held.module->name + "): " + to_string(std::current_exception()));
    }
  }
  held_.clear();
}

}  // namespace brimful
