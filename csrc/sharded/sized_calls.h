#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "reducer/side_group.h"
#include "sharded/collective_tape.h"
#include "sharded/size_exchange.h"

namespace brimful {

/// The sized calls of a model's tape: this rank's are noted, and what it issues for the others without a piece has the sizes of
/// a rank that runs one. Driven by the step's threads, one at a time.
class SizedCalls {
 public:
  /// The ranks of a group, by their number among those of the step.
  using MembersOf = std::function<std::vector<int>(const Group&)>;

  explicit SizedCalls(MembersOf members_of) : members_of_(std::move(members_of)) {}

  /// A tape holds. Until then, and where it has no sized calls, nothing is noted.
  void take_up(const std::vector<CollectiveTape::Entry>& entries, const SideGroup& ranks);
  void begin(int64_t attempt);
  void note(int64_t index, const c10::OperatorHandle& op,
            const std::vector<c10::IValue>& arguments);
  /// This rank's pieces of the attempt have begun the calls before `end`, and begin no other.
  void close(int64_t end);
  /// Issues the attempt's call number `index`, unless no rank of its group has begun it in a piece: then none of them waits.
  /// `check` is called while it waits for the sizes, and may throw.
  /// @throws c10::Error if no sizes are known, or do not come in time
  void issue(const CollectiveCall& call, int64_t index, const std::function<void()>& check);
  /// Before the interpreter ends.
  void release() {
    exchange_.reset();
    members_of_ = nullptr;
  }

 private:
  MembersOf members_of_;
  std::map<const c10d::ProcessGroup*, std::vector<int>> members_;
  std::unique_ptr<SizeExchange> exchange_;
  int rank_ = 0;
  int64_t attempt_ = -1;
  std::chrono::milliseconds timeout_{0};
};

}  // namespace brimful
