#pragma once
#include <brimful/pipeline/checker.h>

#include <string>
#include <vector>

namespace brimful::pipeline {

/// All actions of a schedule in one row, rank after rank, found by what they are. The schedule must outlive it, and all
/// its actions must be of its stages and microbatches.
class Places {
 public:
  explicit Places(const Schedule& schedule);

  const Schedule& schedule() const { return schedule_; }
  int size() const { return static_cast<int>(row_.size()); }
  /// The place of the first such action; -1 if there is none, or no such stage.
  int find(const Action& action) const;
  const Action& action(int place) const { return *row_[place]; }
  int rank(int place) const { return rank_[place]; }
  int first(int rank) const { return first_[rank]; }
  int end(int rank) const { return first_[rank + 1]; }
  /// Whether both are actions of one rank, the first one before the other.
  bool is_before(int place, int other) const { return rank(place) == rank(other) && place < other; }

  /// "1F0"
  std::string text(int place) const;
  /// "action 3", counted in its rank
  std::string number(int place) const;
  /// "1F0 (rank 1, action 3)"
  std::string full_text(int place) const;

 private:
  const Schedule& schedule_;
  std::vector<const Action*> row_;
  std::vector<int> rank_;
  std::vector<int> first_;
  std::vector<int> place_;  ///< by kind, stage and microbatch
};

/// The messages of a channel: places of sends in their order, and of receives in theirs.
struct MessageOrder {
  std::vector<int> sends;
  std::vector<int> receives;
};

/// The channels of a schedule in which each message has one send and one receive, on different ranks.
std::vector<MessageOrder> channels_of(const Places& places, ChannelKind kind);

}  // namespace brimful::pipeline
