#pragma once
#include <brimful/pipeline/checker.h>

#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace brimful::test {

enum class Ending { complete, stuck, failed };

/// Runs a schedule on pure data and knows nothing of checkers: ranks in turn, receives and sends that block, channels
/// of real messages. A rank that gets a wrong message, or does what it has no input for, fails.
class ReferenceExecutor {
 public:
  using Kind = pipeline::ActionKind;
  using Action = pipeline::Action;

  ReferenceExecutor(const pipeline::Schedule& schedule, const pipeline::CheckOptions& options);

  Ending run();

 private:
  enum class Result { done, comes, waits, wrong };  // comes: it says that it waits, the first time
  using Key = std::tuple<Kind, int, int>;
  using Channel = std::tuple<int, int, int, int>;

  bool has(Kind kind, int stage, int microbatch) const {
    return done_.count({kind, stage, microbatch}) > 0;
  }
  bool is_stage(int stage) const { return stage >= 0 && stage < schedule_.stages; }
  int owner(int stage) const {
    const auto ranks = owners_.find(stage);
    return ranks == owners_.end() ? -1 : *ranks->second.begin();
  }
  Channel channel(int from, int to, const Action& action) const;
  Result act(int rank, const Action& action);
  Result compute(int rank, const Action& action);

  /// Whether an action's input is there: from this rank, or received, or, without communication, from anywhere.
  Result input(int rank, int giver, bool made, bool received) const;
  Result communicate(const Action& action);
  Result send(const Action& action, const Channel& key);
  Result receive(const Action& action, const Channel& key);
  bool is_all_done() const;

  const pipeline::Schedule& schedule_;
  pipeline::CheckOptions options_;
  bool communicates_;
  std::vector<size_t> at_;
  std::map<int, std::set<int>> owners_;
  std::set<Key> done_;
  std::map<Channel, std::deque<Action>> channels_;
  std::set<Channel> waiting_;  ///< whose receiver waits, without room in the channel
};

}  // namespace brimful::test
