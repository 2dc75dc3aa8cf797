#pragma once
#include <brimful/sharded/sharded_model.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reducer/side_group.h"
#include "sharded/collective_tape.h"
#include "sharded/noted_calls.h"
#include "sharded/sized_calls.h"

namespace brimful {

/// A ShardedModel's part of an attempt.
class ShardedModel::State final : public ParticipantAttempt {
 public:
  State(std::vector<at::Tensor> parameters, const Group& side_group, ShardedModelHooks hooks,
        std::vector<int> rows_of);

  void begin(int buffer_source) override;
  void set_order(ParticipantAttempt* /*before*/, ParticipantAttempt* /*after*/) override {}
  void begin_forward() override;
  void begin_piece(bool /*last*/, const at::Tensor& /*loss*/) override {}
  void advance() override {}
  bool launched_early() const override { return true; }
  /// Never complete: who fails behind the last gradient repeats with all ranks.
  Progress progress() const override;
  /// @throws RankFailed if a rank fails whose collectives are not known; the groups are aborted then
  void launch_early(Fill fill) override;
  void launch_last(Fill fill, const Announcement& said) override;
  Ending finish() override;
  void abandon() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;

  std::vector<ControlRecord> exchange(const ControlRecord& record, const std::string& what);
  void begin_learning(bool has_data);
  bool end_learning(bool last);
  InnerCollectives inner_collectives() const;
  const SideGroup& ranks() const { return ranks_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::vector<at::Tensor> gradients() const { return hooks_.gradients(); }
  int64_t collectives() const;
  int64_t drained() const { return drained_; }
  /// Before the interpreter ends.
  void release();

 private:
  enum class Learning : uint8_t {
    not_begun,
    refused,  ///< until the attempt ends: a rank had failed, or had no data, and all of them raise
    under_way,  ///< the pieces that show the collectives run on all ranks
    over
  };
  void end_pieces();
  /// Issues what is left of the step's pieces. What fails here aborts the groups.
  void drain();
  void issue_rest();
  /// A rank goes on with other collectives than those that it has shown.
  void on_parting(const std::string& what);
  /// Whoever waits in the groups fails.
  void abort_groups();
  /// The hosts' connections, too.
  void break_all();
  [[noreturn]] void fail(const std::string& text);

  std::vector<at::Tensor> parameters_;
  ShardedModelHooks hooks_;
  std::vector<int> rows_of_;  ///< by rank: the lowest rank that has the same rows
  SizedCalls sized_;
  CollectiveTape tape_;
  Learning learning_ = Learning::not_begun;
  bool all_know_ = false;  ///< the collectives, as all ranks have said
  std::optional<ListeningScope> listens_;
  int64_t pieces_ = 1;  ///< of the attempt, as the ranks agreed
  int64_t begun_ = 0;   ///< of those
  int64_t issued_ = 0;  ///< in the attempt, but for the piece under way
  int64_t drained_ = 0;
  Announcement said_;
  std::mutex breaking_;
  std::atomic<bool> broken_ = false;  ///< the groups
  std::string why_broken_;            ///< what this rank said first
  SideGroup ranks_;                   ///< last: its threads call back
};

}  // namespace brimful
