#include <ATen/core/grad_mode.h>
#include <brimful/ladder/recomputable.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <vector>

#include "ladder/modules.h"
#include "ladder/part_figures.h"
#include "memory/left_bytes.h"

namespace brimful {
namespace {
constexpr size_t kMeasuredPieces = 2;  // the second finds gradients
using Clock = std::chrono::steady_clock;
}  // namespace

/// Numbers names as they come, and measures the attempt that is under way.
class Recomputable::Parts final : public ladder::Modules,
                                  public std::enable_shared_from_this<Parts> {
 public:
  std::vector<std::string> names() const override {
    const std::lock_guard lock(mutex_);
    return names_;
  }
  ladder::Allowed allowed() const override {
    const std::lock_guard lock(mutex_);
    const auto parts = names_.size();
    return {std::vector<bool>(parts, true), std::vector<bool>(parts, false),
            std::vector<bool>(parts, true)};
  }
  std::vector<int32_t> coarse() const override {
    const std::lock_guard lock(mutex_);
    std::vector<int32_t> all;
    all.reserve(names_.size());
    for (size_t i = 0; i < names_.size(); ++i) {
      all.push_back(static_cast<int32_t>(i));
    }
    return all;
  }
  std::vector<at::Tensor> standing() const override { return {}; }
  bool can_offload() const override { return false; }
  void set_device(c10::Device device) override { device_ = device; }

  void begin(const Rungs& rungs, std::shared_ptr<ladder::Aside> /*aside*/,
             std::shared_ptr<ladder::StepEventRecorder> /*recorder*/) override {
    TORCH_CHECK_VALUE(
        !rungs.everything && rungs.offloaded.empty(),
        "a program in C++ has no hooks by which tensors could be offloaded "
        "(offloaded: ",
        rungs.everything ? "everything" : names().at(static_cast<size_t>(rungs.offloaded.front())),
        "); let its parts be recomputed");
    const std::lock_guard lock(mutex_);
    rungs_ = rungs.recomputed;
    takes_new_ = rungs_.size() == names_.size();
    used_before_ = memory::stats(device_).used_bytes;
    pieces_.clear();
    is_whole_ = true;
    is_on_ = true;
    ++attempt_;
  }
  void begin_forward() override {
    const std::lock_guard lock(mutex_);
    end_phase();
    pieces_.emplace_back();
    inside_ = 0;
    phase_.emplace(device_);
    running_ = kNoCall;
  }
  void end_forward() noexcept override {}
  void end() noexcept override {
    const std::lock_guard lock(mutex_);
    is_on_ = false;
    phase_.reset();
    inside_ = 0;
  }
  std::string rejected() const override { return {}; }

  std::vector<int32_t> recomputed() const override {
    const std::lock_guard lock(mutex_);
    return rungs_;
  }
  std::optional<ladder::StepEvents> measured() override {
    const std::lock_guard lock(mutex_);
    end_phase();
    if (!is_whole_ || pieces_.empty()) {
      return std::nullopt;
    }
    const auto& piece = pieces_[std::min(pieces_.size(), kMeasuredPieces) - 1];
    if (piece.calls.empty() || piece.second_run.size() != piece.calls.size()) {
      return std::nullopt;  // some had no backward, or several
    }
    return ladder::events_of(piece);
  }

  std::shared_ptr<detail::PartCall> begin_call(const std::string& name);

 private:
  class Call;
  static constexpr int64_t kNoCall = -1;

  int32_t number_of(const std::string& name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) {
      names_.push_back(name);
      return static_cast<int32_t>(names_.size()) - 1;
    }
    return static_cast<int32_t>(found - names_.begin());
  }
  bool recomputes(int32_t part, bool is_new) {
    if (is_new && takes_new_) {
      rungs_.push_back(part);
    }
    return std::binary_search(rungs_.begin(), rungs_.end(), part);
  }
  /// What was in use meanwhile is the peak of the call whose second run began it.
  void end_phase() {
    if (!phase_ || pieces_.empty()) {
      return;
    }
    auto& piece = pieces_.back();
    const auto peak = phase_->peak_bytes() - used_before_;
    auto& noted = running_ == kNoCall ? piece.peak_bytes
                                      : piece.calls[static_cast<size_t>(running_)].peak_bytes;
    noted = std::max(noted, peak);
    phase_.reset();
  }

  mutable std::mutex mutex_;
  std::vector<std::string> names_;
  c10::Device device_ = c10::Device(c10::DeviceType::CPU);
  bool is_on_ = false;  ///< an attempt with rungs is under way
  int64_t attempt_ = 0;
  std::vector<int32_t> rungs_;
  bool takes_new_ = false;  ///< names that come up in this attempt are recomputed, too
  bool is_whole_ = true;    ///< all that was called was recomputed
  int64_t used_before_ = 0;
  int64_t inside_ = 0;  ///< functions of parts that are running
  std::vector<ladder::PartFigures> pieces_;
  std::optional<memory::PeakScope> phase_;
  int64_t running_ = kNoCall;
};

class Recomputable::Parts::Call final : public detail::PartCall {
 public:
  /// Of the newest piece of the attempt under way.
  Call(std::shared_ptr<Parts> parts, int64_t place)
      : parts_(std::move(parts)),
        attempt_(parts_->attempt_),
        piece_(parts_->pieces_.size()),
        place_(place) {}

  void begin_run() override {
    const std::lock_guard lock(parts_->mutex_);
    ++parts_->inside_;
    ++runs_;
    if (is_measured() && runs_ == 2) {
      parts_->end_phase();
      parts_->phase_.emplace(parts_->device_);
      parts_->running_ = place_;
      parts_->pieces_.back().second_run.push_back(place_);
    }
    left_.emplace(parts_->device_);
    began_ = Clock::now();
  }
  void end_run() noexcept override {
    const std::lock_guard lock(parts_->mutex_);
    --parts_->inside_;
    const auto left = left_ ? left_->bytes() : 0;
    left_.reset();
    if (!is_measured()) {
      return;
    }
    auto& figures = parts_->pieces_.back().calls[static_cast<size_t>(place_)];
    if (runs_ == 1) {
      figures.forward_ms = std::chrono::duration<double, std::milli>(Clock::now() - began_).count();
      outputs_ = left;
    } else if (runs_ == 2) {
      figures.saved_bytes = std::max<int64_t>(left - outputs_, 0);
    }
  }

 private:
  /// A graph may outlive its attempt.
  bool is_measured() const {
    return parts_->is_on_ && attempt_ == parts_->attempt_ && piece_ == parts_->pieces_.size();
  }

  std::shared_ptr<Parts> parts_;
  int64_t attempt_;
  size_t piece_;
  int64_t place_;
  int runs_ = 0;
  int64_t outputs_ = 0;
  std::optional<memory::LeftBytes> left_;
  Clock::time_point began_;
};

std::shared_ptr<detail::PartCall> Recomputable::Parts::begin_call(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto known = static_cast<int32_t>(names_.size());
  const auto part = number_of(name);
  if (!is_on_ || pieces_.empty() || inside_ > 0 || !at::GradMode::is_enabled()) {
    return nullptr;
  }
  if (!recomputes(part, part == known)) {
    is_whole_ = false;
    return nullptr;
  }
  auto& calls = pieces_.back().calls;
  calls.push_back({part});
  return std::make_shared<Call>(shared_from_this(), static_cast<int64_t>(calls.size()) - 1);
}

Recomputable::Recomputable(CheckpointOptions options)
    : options_(options), parts_(std::make_shared<Parts>()) {}

std::shared_ptr<ladder::Modules> Recomputable::modules() const {
  return parts_;
}

std::shared_ptr<detail::PartCall> Recomputable::begin_call(const std::string& name) const {
  return parts_->begin_call(name);
}

}  // namespace brimful
