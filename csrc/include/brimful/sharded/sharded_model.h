#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/participant.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroup;  // <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}

namespace brimful {

/// What a ShardedModel asks of whoever sharded the model, such as FSDP2.
struct ShardedModelHooks {
  /// An attempt begins (true): gradients are summed over the ranks, and not divided, and nothing of forwards outside of steps
  /// decides which collectives its pieces make. Or it has ended (false), and all is as the program has it.
  std::function<void(bool)> in_attempt;
  /// After a piece that failed, or whose gradients shall not stay: parameters are shards and have no gradient, and nothing is
  /// kept of the piece. Makes no collective.
  std::function<void()> reset;
  /// This rank's shards of the gradients, as they are.
  std::function<std::vector<at::Tensor>()> gradients;
  /// Whose parameters or gradients the collective that begins now moves, by a number that stays; -1: it moves something else,
  /// and its sizes may be others in each piece.
  std::function<int64_t()> source_of_call;
  /// What this rank gives to a gather of that source's parameters, as one flat tensor; undefined if it is not known.
  std::function<at::Tensor(int64_t source)> shard_of;
  /// The ranks of a group that the model's collectives use, by their number in the side group. Where it is not there, a rank
  /// that fails cannot issue collectives whose sizes are others in each piece.
  std::function<std::vector<int>(const c10::intrusive_ptr<c10d::ProcessGroup>&)> members_of = {};
};

/// Makes a model whose parameters are sharded over the ranks a part of a step. Its collectives come within forward and
/// backward, in the same order on all ranks: two pieces of few rows show them before the first step. A rank that fails
/// issues those that are left of the step, with its own shards in what gathers parameters and zeros in all else, so that no
/// rank waits for ever; then all agree on the step between their hosts. All ranks run the same number of pieces. Of
/// collectives whose sizes follow the rows it asks a rank that runs the piece for the sizes.
///
/// A piece whose collectives are others than those that were seen ends this: the step goes on, and a rank that fails later
/// aborts the groups, so that all ranks raise RankFailed. Not thread-safe.
class BRIMFUL_API ShardedModel final : public Participant {
 public:
  /// `parameters` need gradients. `side_group`: a group for tensors on the CPU with the same ranks, which nothing else uses.
  /// `rows_of`: by rank, the lowest rank that is given the same rows, such as another one of a tensor-parallel group; they
  /// count once. Empty: each rank has its own.
  static std::shared_ptr<ShardedModel> create(
      std::vector<at::Tensor> parameters, const c10::intrusive_ptr<c10d::ProcessGroup>& side_group,
      ShardedModelHooks hooks, std::vector<int> rows_of = {});
  ~ShardedModel() override;
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  /// Collectives of a piece; 0 until they are known.
  int64_t collectives() const;
  /// Of those, what this rank has issued for pieces that it did not run to their end.
  int64_t drained() const;

  int rank() const override;
  int world_size() const override;
  int64_t step() const override;
  const std::vector<at::Tensor>& parameters() const override;
  std::vector<at::Tensor> gradients() const override;
  const FailureBoard& board() const override;
  std::vector<ControlRecord> exchange(const ControlRecord& record) override;
  std::vector<at::Tensor> gather(const at::Tensor& own) override;
  void sum(at::Tensor& tensor) override;
  InnerCollectives inner_collectives() const override;
  void begin_learning(bool has_data) override;
  bool end_learning(bool last) override;
  ParticipantAttempt& attempt() override;

 private:
  class State;
  explicit ShardedModel(std::unique_ptr<State> state);

  std::unique_ptr<State> s_;
};

}  // namespace brimful
