#include "known.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>

#include "pending.h"
#include "sim_cuda.h"
#include "state.h"

namespace {

using Answer = int (*)(void* to, const void* from, size_t bytes);

constexpr uintptr_t kTouched = uintptr_t{64} << 10;  // so that a device has few mappings
constexpr size_t kGivenBack = size_t{1} << 20;
constexpr size_t kTensorsInAll = 32;

std::atomic<Answer> answer = nullptr;

/// Ranges of addresses, apart from each other.
class Ranges {
 public:
  std::mutex mutex;

  void add(uintptr_t begin, uintptr_t end) {
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin() && std::prev(at)->second >= begin) {
      --at;
    }
    while (at != ranges_.end() && at->first <= end) {
      begin = std::min(begin, at->first);
      end = std::max(end, at->second);
      bytes_ -= at->second - at->first;
      at = ranges_.erase(at);
    }
    ranges_[begin] = end;
    bytes_ += end - begin;
  }

  void remove(uintptr_t begin, uintptr_t end) {
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin()) {
      --at;
    }
    while (at != ranges_.end() && at->first < end) {
      const auto [first, last] = *at;
      if (last <= begin) {
        ++at;
        continue;
      }
      at = ranges_.erase(at);
      bytes_ -= last - first;
      if (first < begin) {
        ranges_[first] = begin;
        bytes_ += begin - first;
      }
      if (last > end) {
        ranges_[end] = last;
        bytes_ += last - end;
        return;
      }
    }
  }

  bool hold(uintptr_t begin, uintptr_t end) const {
    const auto at = ranges_.upper_bound(begin);
    return at != ranges_.begin() && std::prev(at)->second >= end;
  }

  /// How far the range goes on that holds `begin`.
  uintptr_t end_of(uintptr_t begin) const {
    const auto at = ranges_.upper_bound(begin);
    return at == ranges_.begin() ? begin : std::max(begin, std::prev(at)->second);
  }

  size_t bytes() const { return bytes_; }

 private:
  std::map<uintptr_t, uintptr_t> ranges_;  // begin and end
  size_t bytes_ = 0;
};

Ranges& ranges() {
  static auto* all = new Ranges;
  return *all;
}

uintptr_t number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

/// The pages of a block that hold these bytes, and some around them; none where that is no memory of a device.
std::pair<uintptr_t, uintptr_t> pages_of(const void* begin, size_t bytes) {
  constexpr uintptr_t kPage = 4096;
  sim::State& s = sim::state();
  const std::lock_guard lock(s.mutex);
  auto at = s.blocks.upper_bound(number(begin));
  if (at == s.blocks.begin()) {
    return {};
  }
  --at;
  const uintptr_t last = at->first + at->second.bytes;
  const bool on_device =
      at->second.kind == sim::Kind::device || at->second.kind == sim::Kind::mapped;
  if (!on_device || number(begin) + bytes > last) {
    return {};
  }
  return {std::max(at->first / kPage * kPage, number(begin) / kTouched * kTouched),
          std::min((last + kPage - 1) / kPage * kPage,
                   (number(begin) + bytes + kTouched - 1) / kTouched * kTouched)};
}

/// Gives whole pages of the host back that nothing is known of.
void give_back(uintptr_t begin, uintptr_t end) {
  begin = (begin + kTouched - 1) / kTouched * kTouched;
  end = end / kTouched * kTouched;
  if (end > begin) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
}

}  // namespace

namespace sim {

bool keep(void* begin, size_t bytes) {
  settle(begin, bytes);
  const size_t allowed = settings().known_bytes;
  const auto [first, last] = pages_of(begin, bytes);
  if (bytes == 0 || bytes > allowed || first == last) {
    forget(begin, bytes);
    return false;
  }
  const std::lock_guard lock(ranges().mutex);
  const uintptr_t from = number(begin);
  if (!ranges().hold(from, from + bytes)) {
    ranges().remove(from, from + bytes);
    if (ranges().bytes() + bytes > kTensorsInAll * allowed ||
        mprotect(reinterpret_cast<void*>(first), last - first, PROT_READ | PROT_WRITE) != 0) {
      return false;
    }
    ranges().add(from, from + bytes);
  }
  return true;
}

void forget(const void* begin, size_t bytes) {
  if (settings().known_bytes == 0 || bytes == 0) {
    return;
  }
  settle(begin, bytes);
  const uintptr_t from = number(begin);
  const std::lock_guard lock(ranges().mutex);
  const size_t before = ranges().bytes();
  ranges().remove(from, from + bytes);
  if (before - ranges().bytes() >= kGivenBack) {
    give_back(from, from + bytes);
  }
}

bool is_known(const void* begin, size_t bytes) {
  settle(begin, bytes);
  const std::lock_guard lock(ranges().mutex);
  return bytes == 0 || ranges().hold(number(begin), number(begin) + bytes);
}

size_t known_before(const void* begin, size_t bytes) {
  settle(begin, bytes);
  const std::lock_guard lock(ranges().mutex);
  return std::min<size_t>(bytes, ranges().end_of(number(begin)) - number(begin));
}

void read_unknown(void* to, const void* from, size_t bytes) {
  const Answer given = answer;
  if (given == nullptr || given(to, from, bytes) == 0) {
    std::memset(to, 0, bytes);
  }
}

}  // namespace sim

extern "C" {

int sim_cuda_keep(void* begin, size_t bytes) {
  return sim::keep(begin, bytes) ? 1 : 0;
}

void sim_cuda_forget(const void* begin, size_t bytes) {
  sim::forget(begin, bytes);
}

int sim_cuda_is_known(const void* begin, size_t bytes) {
  return sim::is_known(begin, bytes) ? 1 : 0;
}

size_t sim_cuda_known_bytes() {
  return sim::settings().known_bytes;
}

int sim_cuda_unknown() {
  return static_cast<int>(sim::settings().unknown);
}

void sim_cuda_answer_unknown(Answer given) {
  answer = given;
}
}
