#pragma once
#include <brimful/pipeline/executor.h>
#include <brimful/pipeline/peers.h>

#include <vector>

#include "pipeline/group_channel.h"

namespace brimful::pipeline {

/// How an attempt has ended on the rank that it ended worst on.
struct PeerVerdict {
  enum class Kind : int64_t { ok, out_of_memory, error };
  Kind kind = Kind::ok;
  int64_t rank = 0;
  int64_t rows = 0;       ///< that the ranks must have alike
  bool may_split = true;  ///< no rank's BatchNorms refuse to
  double loss_sum = 0;
  double weight = 0;
  std::string text;  ///< cut where it is long
};

class Peers {
 public:
  explicit Peers(c10::intrusive_ptr<c10d::ProcessGroup> group);

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }
  /// `channel`: its number, the same on both ends.
  std::unique_ptr<GroupChannel> channel(int peer, int channel);

  /// Passes the worst verdict along the ranks, and the final one back: 2 * (ranks - 1) small messages in all. Called by
  /// every rank after its last action of an attempt.
  /// @throws RankFailed if the group broke
  PeerVerdict agree(const PeerVerdict& own);
  int64_t messages() const { return messages_; }

 private:
  void send(int peer, const PeerVerdict& verdict, int tag);
  PeerVerdict receive(int peer, int tag);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t messages_ = 0;  ///< of verdicts that this rank has sent
};

}  // namespace brimful::pipeline
