#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "sharded/issued_sizes.h"

namespace brimful {

/// A rank that issues a collective without a piece asks the ranks that run one for its sizes, in the store of their group. A
/// thread answers, since the rank that is asked waits in a collective. Nothing is asked while no rank fails: the thread
/// waits for a key. All but the constructor and the destructor may be called from any thread.
class SizeExchange {
 public:
  /// `prefix`: of the keys, the same on all ranks. Without a store nothing is answered.
  SizeExchange(const c10::intrusive_ptr<c10d::Store>& store, std::string prefix, int rank);
  ~SizeExchange();
  SizeExchange(const SizeExchange&) = delete;
  SizeExchange& operator=(const SizeExchange&) = delete;

  /// What this rank's pieces issue.
  IssuedSizes& own();
  /// Those of the attempt's call number `index` on that rank; nothing if its pieces ended before the call. Waits until either is
  /// known. `check` is called meanwhile, and may throw.
  /// @throws std::exception if the store is gone
  std::optional<CallSizes> ask(int rank, int64_t attempt, int64_t index,
                               const std::function<void()>& check);

 private:
  struct Shared;

  std::shared_ptr<Shared> shared_;  ///< the thread's, too, which may live longer
};

}  // namespace brimful
