#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include "probes/oom/index_check.h"

namespace brimful::probes {

class PinnedPlace;

/// Integers of a CUDA tensor on their way to pinned memory, by an asynchronous copy that comes before whatever reads them
/// next in the stream. Any thread; waits for no device, and can be destroyed when it is dead.
class PinnedCopy {
 public:
  static constexpr int64_t kMostCopied = 2048;

  /// Nothing where all places wait for their copies still: the host is too far ahead of the device.
  static std::shared_ptr<PinnedCopy> begin(const IndexUse& use);

  /// Whether the device has still to make it; false where the device is lost.
  bool pending() const;
  /// Of what has come by now; `IndexUse::first` stands for what has not.
  std::optional<IndexRange> range() const;

 private:
  friend struct PinnedPlaces;
  void come();

  PinnedPlace* place_ = nullptr;     ///< until the values have come
  std::optional<IndexRange> range_;  ///< from then on
  int64_t count_ = 0;
  std::optional<int64_t> ignored_;
};

}  // namespace brimful::probes
