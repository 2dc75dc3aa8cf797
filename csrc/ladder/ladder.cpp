#include "ladder/ladder.h"

#include <brimful/memory/stats.h>

#include <algorithm>

#include "ladder/put_aside.h"
#include "memory/cuda_caching.h"

namespace brimful::ladder {
namespace {
constexpr size_t kMostKinds = 8;
constexpr double kMoreMargin = 0.02;
constexpr double kMostMargin = 0.5;
// What a step takes beside its pieces: sums of losses and of BatchNorms.
constexpr int64_t kBesideBytes = 16384;
constexpr int64_t kRecordedPieces = 2;  // the second finds gradients
constexpr int64_t kShareOfMoreRoom = 32;
}  // namespace

Ladder::Ladder(std::shared_ptr<Modules> modules, c10::Device device, bool recompute, bool offload)
    : modules_(std::move(modules)), device_(device), recompute_(recompute), offload_(offload) {
  modules_->set_device(device);
  if (!modules_->can_offload()) {
    has_room_aside_ = false;
  }
}

Ladder::Known* Ladder::find(const Kind& kind) {
  const auto found = std::find_if(known_.begin(), known_.end(),
                                  [&](const auto& known) { return known.kind == kind; });
  if (found == known_.end()) {
    return nullptr;
  }
  known_.splice(known_.begin(), known_, found);
  return &known_.front();
}

const Ladder::Known* Ladder::find(const Kind& kind) const {
  const auto found = std::find_if(known_.begin(), known_.end(),
                                  [&](const auto& known) { return known.kind == kind; });
  return found == known_.end() ? nullptr : &*found;
}

Allowed Ladder::allowed() const {
  auto allowed = modules_->allowed();
  if (!recompute_) {
    allowed.recompute.assign(allowed.recompute.size(), false);
  }
  if (!offload_ || !has_room_aside_.value_or(true)) {
    allowed.offload.assign(allowed.offload.size(), false);
  }
  return allowed;
}

void Ladder::leave_out_offload() {
  has_room_aside_ = false;
  for (auto& known : known_) {
    known.chosen_in = {};
  }
}

bool Ladder::can_put_aside() {
  if (!has_room_aside_) {
    has_room_aside_ = ladder::can_put_aside(device_);
  }
  return *has_room_aside_;
}

/// On CUDA the sum of what a plan holds is not all: its allocator has room in segments.
Fits Ladder::fits_in_pool(const Known& known) const {
  auto pool =
      device_.is_cuda() && modules_->can_offload() ? memory::cuda_pool(device_) : std::nullopt;
  if (!pool) {
    return {};
  }
  return [pool = std::move(*pool), &known, whole = modules_->allowed().whole](const Rungs& rungs) {
    return !pool.replay(requests_of(known.step, rungs, whole, pool.stream)).ran_out;
  };
}

Rungs Ladder::choose(Known& known, Room room) {
  if (!room) {
    return known.chosen;
  }
  const bool is_same = known.chosen_in && *room >= *known.chosen_in &&
                       *room - *known.chosen_in <= *known.chosen_in / kShareOfMoreRoom;
  if (!is_same) {
    const auto usable = static_cast<double>(*room - kBesideBytes) / (1 + known.margin);
    const auto choice =
        cheapest(known.step, allowed(), static_cast<int64_t>(usable), fits_in_pool(known));
    known.chosen = choice ? choice->rungs : least();
    known.chosen_in = room;
  }
  return known.chosen;
}

/// What takes the least memory.
Rungs Ladder::least() {
  Rungs rungs;
  if (can_put_aside()) {
    rungs.everything = true;
  } else if (recompute_) {
    rungs.recomputed = modules_->coarse();
  }
  return rungs;
}

Rungs Ladder::first(const Kind& kind, Room room) {
  auto* const known = find(kind);
  return known == nullptr ? Rungs{} : choose(*known, room);
}

std::optional<Rungs> Ladder::next(const Kind& kind, const Rungs& failed, Room room) {
  if (failed.everything) {
    return std::nullopt;
  }
  if (auto* const known = find(kind)) {
    if (known->chosen_in && known->chosen == failed) {
      known->margin = std::min(known->margin + kMoreMargin, kMostMargin);
    }
    known->chosen_in = {};
    auto rungs = choose(*known, room);
    if (rungs != failed) {
      return rungs;
    }
  }
  const auto next = least();
  return next.empty() || next == failed ? std::nullopt : std::optional(next);
}

std::optional<PlanCost> Ladder::cost_of(const Kind& kind, const Rungs& rungs) const {
  const auto* const known = find(kind);
  return known != nullptr ? std::optional(ladder::cost_of(known->step, rungs)) : std::nullopt;
}

double Ladder::forward_ms(const Kind& kind) const {
  const auto* const known = find(kind);
  double sum = 0;
  if (known != nullptr) {
    for (const auto& call : known->step.calls) {
      sum += call.parent == kNever ? call.forward_ms : 0;
    }
  }
  return sum;
}

std::vector<std::string> Ladder::names_of(const std::vector<int32_t>& modules) const {
  const auto all = modules_->names();
  std::vector<std::string> names;
  names.reserve(modules.size());
  for (const auto module : modules) {
    names.push_back(all.at(static_cast<size_t>(module)));
  }
  return names;
}

std::vector<int32_t> Ladder::numbers_of(const std::vector<std::string>& names) const {
  const auto all = modules_->names();
  std::vector<int32_t> numbers;
  for (const auto& name : names) {
    const auto found = std::find(all.begin(), all.end(), name);
    TORCH_CHECK_VALUE(found != all.end(), "the model has no module of this name (name: '", name,
                      "'); names are those of named_modules()");
    numbers.push_back(static_cast<int32_t>(found - all.begin()));
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

Ladder::Attempt::Attempt(Ladder& ladder, Kind kind, const Rungs& rungs,
                         const std::vector<at::Tensor>& batch)
    : ladder_(ladder), kind_(std::move(kind)) {
  if (rungs.everything || !rungs.offloaded.empty()) {
    if (rungs.everything && ladder.find(kind_) == nullptr) {
      recorder_ = std::make_shared<StepEventRecorder>(ladder.device_);
    }
    aside_ = std::make_shared<Aside>(ladder.device_, recorder_, rungs.ahead);
    aside_->keep(batch);
    aside_->keep(ladder.modules_->standing());
  }
  ladder.modules_->begin(rungs, aside_, recorder_);
}

Ladder::Attempt::~Attempt() {
  if (recorder_) {
    recorder_->stop();  // what it put aside may live on, in the frames of an error
  }
  ladder_.modules_->end();
}

void Ladder::Attempt::begin_forward() {
  ladder_.modules_->begin_forward();
  if (recorder_ && !found_) {
    if (pieces_ == kRecordedPieces) {
      found_ = recorder_->finish();
    } else {
      recorder_->begin_forward();
    }
  }
  ++pieces_;
}

void Ladder::Attempt::end_forward() noexcept {
  ladder_.modules_->end_forward();
  if (recorder_) {
    recorder_->begin_backward();
  }
}

void Ladder::Attempt::complete() {
  if (recorder_ && !found_) {
    found_ = recorder_->finish();
  } else if (!recorder_ && ladder_.find(kind_) == nullptr) {
    found_ = ladder_.modules_->measured();
  }
  if (!found_) {
    return;
  }
  ladder_.known_.push_front({kind_, std::move(*found_)});
  if (ladder_.known_.size() > kMostKinds) {
    ladder_.known_.pop_back();
  }
}

}  // namespace brimful::ladder
