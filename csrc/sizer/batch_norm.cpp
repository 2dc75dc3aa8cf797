#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "sizer/norm_calls.h"
#include "step/copy_each.h"

namespace brimful {
namespace {
constexpr size_t kNamed = 8;   // modules in a message
constexpr int64_t kLooks = 4;  // forwards until a module that changes no statistics is believed

std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamed; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() > kNamed ? text + " and " + std::to_string(names.size() - kNamed) + " more"
                               : text;
}

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

bool names_statistics(const std::string& name) {
  static const std::unordered_set<std::string> words{
      "running", "moving",  "mean", "var", "variance", "std", "ema",
      "avg",     "average", "amax", "min", "max",      "size"};
  size_t begin = 0;
  while (begin < name.size()) {
    const auto end = std::min(name.find('_', begin), name.size());
    if (words.count(name.substr(begin, end - begin)) != 0) {
      return true;
    }
    begin = end + 1;
  }
  return false;
}

BatchNorms::BatchNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules)
    : policy_(policy), looks_left_(kLooks) {
  for (auto& module : modules) {
    (module.statistics ? others_ : modules_).push_back(std::move(module));
  }
  seen_.assign(others_.size(), false);
}

std::string BatchNorms::names() const {
  std::vector<std::string> names;
  for (const auto& module : modules_) {
    if (couples_rows(module.state())) {
      names.push_back(module.name);
    }
  }
  return list_names(names);
}

std::string BatchNorms::names_of_others() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < others_.size(); ++i) {
    if (seen_[i] && others_[i].state().training) {
      names.push_back(others_[i].name);
    }
  }
  return list_names(names);
}

bool BatchNorms::may_split() const {
  return policy_ != BatchNormPolicy::refuse || (names().empty() && names_of_others().empty());
}

void BatchNorms::require_whole(int64_t pieces) const {
  if (pieces <= 1 || may_split()) {
    return;
  }
  const auto coupled = names();
  const auto others = names_of_others();
  TORCH_CHECK_VALUE(false,
                    "this model's batches must not be split (batch_norm: refuse, pieces: ", pieces,
                    coupled.empty() ? "" : ", BatchNorm modules: ", coupled,
                    others.empty() ? "" : ", modules that keep running statistics: ", others,
                    "); give the device more memory, use GroupNorm, or choose another batch_norm");
}

std::vector<BatchNorms::Watched> BatchNorms::watch() {
  std::vector<Watched> watched;
  if (others_.empty() || looks_left_ == 0) {
    return watched;
  }
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < others_.size(); ++i) {
    if (!seen_[i] && others_[i].state().training) {
      watched.push_back({i, others_[i].statistics(), {}});
      for (const auto& tensor : watched.back().statistics) {
        watched.back().copies.push_back(tensor.clone());
      }
    }
  }
  return watched;
}

void BatchNorms::look(const std::vector<Watched>& watched, int64_t pieces) {
  if (others_.empty() || (watched.empty() && warned_of_others_)) {
    return;
  }
  if (!watched.empty()) {
    --looks_left_;
    for (const auto& module : watched) {
      const auto now = others_[module.module].statistics();
      bool same = now.size() == module.statistics.size();
      for (size_t i = 0; same && i < now.size(); ++i) {
        same = now[i].is_same(module.statistics[i]) && at::equal(now[i], module.copies[i]);
      }
      seen_[module.module] = !same;
    }
    require_whole(pieces);
  }
  const auto names = names_of_others();
  if (pieces < 2 || names.empty() || warned_of_others_) {
    return;
  }
  warned_of_others_ = true;
  log(LogLevel::warning,
      "the batch is split, and modules that keep running statistics update them with every piece: "
      "the result depends on the split (modules: " +
          names +
          "); batch_norm=\"refuse\" keeps batches whole; \"rescale\" and \"freeze\" know torch's "
          "BatchNorm only");
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

BatchNorms::Piece BatchNorms::begin_piece(int64_t piece, int64_t pieces) {
  Piece begun;
  begun.calls = before_piece(piece, pieces);
  begun.watched = watch();
  return begun;
}

void BatchNorms::end_piece(int64_t piece, int64_t pieces, const Piece& begun) {
  after_piece(piece, begun.calls.get());
  look(begun.watched, pieces);
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
