// A place is used again only when the event behind its last copy has passed: the device may be far behind the host, and
// would write the values of one operator over those of another.
#include "probes/oom/pinned_copies.h"
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

namespace brimful::probes {

class PinnedPlace {
 public:
  explicit PinnedPlace(at::Tensor memory) : memory_(std::move(memory)) {}

  void copy(const at::Tensor& source, int64_t until_then) {
    auto here = memory_.narrow(0, 0, source.numel()).view(source.sizes());
    here.fill_(until_then);
    const auto device = source.device();
    if (!behind_ || behind_->device_index() != device.index()) {
      behind_.emplace(device.type());
    }
    here.copy_(source, /*non_blocking=*/true);
    behind_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  enum class State : uint8_t { pending, passed, lost };
  State state() const {
    try {
      return behind_->query() ? State::passed : State::pending;
    } catch (...) {
      return State::lost;
    }
  }

  const int64_t* values() const { return memory_.const_data_ptr<int64_t>(); }

 private:
  at::Tensor memory_;
  std::optional<c10::Event> behind_;
};

/// Pinned memory is made once and never freed, since freeing asks a device that may be dead.
struct PinnedPlaces {
  std::mutex mutex;
  std::vector<PinnedPlace*> unused;
  struct Used {
    PinnedPlace* place;
    std::weak_ptr<PinnedCopy> copy;
  };
  std::deque<Used> used;

  PinnedPlaces() {
    constexpr int64_t kPlaces = 1024;  // as many launches as a stream takes before its host waits
    const auto memory = at::empty({kPlaces, PinnedCopy::kMostCopied},
                                  at::TensorOptions().dtype(at::kLong).pinned_memory(true));
    for (int64_t i = 0; i < kPlaces; ++i) {
      unused.push_back(new PinnedPlace(memory.select(0, i)));
    }
  }

  bool release(const Used& each) {
    if (each.place->state() != PinnedPlace::State::passed) {
      return false;
    }
    if (const auto copy = each.copy.lock()) {
      copy->come();
    }
    unused.push_back(each.place);
    return true;
  }

  PinnedPlace* take() {
    while (!used.empty() && release(used.front())) {
      used.pop_front();
    }
    if (unused.empty()) {  // another stream than the oldest copy's may be further
      std::erase_if(used, [this](const Used& each) { return release(each); });
    }
    if (unused.empty()) {
      return nullptr;
    }
    auto* const place = unused.back();
    unused.pop_back();
    return place;
  }
};

namespace {
PinnedPlaces& pinned_places() {
  static auto* all = new PinnedPlaces();
  return *all;
}
}  // namespace

std::shared_ptr<PinnedCopy> PinnedCopy::begin(const IndexUse& use) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto source = use.index.to(at::kLong).contiguous();  // first: it may need memory
  auto made = std::make_shared<PinnedCopy>();
  auto& all = pinned_places();
  const std::lock_guard lock(all.mutex);
  made->place_ = all.take();
  if (made->place_ == nullptr) {
    return nullptr;
  }
  made->count_ = source.numel();
  made->ignored_ = use.ignored;
  made->place_->copy(source, use.first);
  all.used.push_back({made->place_, made});
  return made;
}

void PinnedCopy::come() {
  range_ = range_of(place_->values(), count_, ignored_);
  place_ = nullptr;
}

bool PinnedCopy::pending() const {
  const std::lock_guard lock(pinned_places().mutex);
  return place_ != nullptr && place_->state() == PinnedPlace::State::pending;
}

std::optional<IndexRange> PinnedCopy::range() const {
  const std::lock_guard lock(pinned_places().mutex);
  return place_ == nullptr ? range_ : range_of(place_->values(), count_, ignored_);
}

}  // namespace brimful::probes
