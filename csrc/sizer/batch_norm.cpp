#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>

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
          coupled + "); choose batch_norm=\"freeze\", \"rescale\" or \"refuse\", or use GroupNorm");
}

void BatchNorms::hold() {
  const memory::Unlimited unlimited;
  for (const auto& module : modules_) {
    const auto state = module.state();
    if (!updates_statistics(state)) {
      continue;
    }
    Held held{&module, state, {}, 0};
    const auto batches = module.batches();
    if (policy_ == BatchNormPolicy::rescale && batches.defined()) {
      held.batches = batches.clone();
      held.seen = state.momentum ? 0 : batches.item<double>();
    }
    held_.push_back(std::move(held));
  }
}

void BatchNorms::change(const Held& held, int64_t piece, int64_t pieces) const {
  auto state = held.before;
  if (policy_ == BatchNormPolicy::freeze) {
    if (piece == 1) {
      state.tracks = false;
      held.module->set_state(state);
    }
    return;
  }
  if (piece > 0 && held.batches.defined()) {
    held.module->batches().copy_(held.batches);  // the last piece counts for the step
  }
  if (!state.momentum) {
    const auto k = static_cast<double>(pieces);
    state.momentum = 1 / (k * held.seen + static_cast<double>(piece) + 1);
  } else if (*state.momentum >= 0 && *state.momentum <= 1) {
    state.momentum = momentum_of_piece(*state.momentum, pieces);
  }
  held.module->set_state(state);
}

void BatchNorms::before_piece(int64_t piece, int64_t pieces) {
  if (pieces < 2 || modules_.empty()) {
    return;
  }
  if (policy_ == BatchNormPolicy::warn) {
    warn();
    return;
  }
  if (policy_ == BatchNormPolicy::refuse) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (piece == 0) {
    after_step();
    hold();
  }
  for (const auto& held : held_) {
    change(held, piece, pieces);
  }
}

void BatchNorms::after_step() noexcept {
  for (const auto& held : held_) {
    try {
      held.module->set_state(held.before);
    } catch (...) {
      log(LogLevel::error, "a BatchNorm module's momentum could not be put back (module: " +
                               held.module->name + "): " + describe(std::current_exception()));
    }
  }
  held_.clear();
}

}  // namespace brimful
