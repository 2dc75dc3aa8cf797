#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/participant.h>

#include <functional>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroup;  // <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}

namespace brimful {

/// Makes another reducer, torch's DistributedDataParallel, part of a step. The pieces run without it; when a rank
/// has all its gradients, or has failed, all ranks exchange their records over a group of its own, and reduce only if none
/// has failed. So a shortage anywhere in forward or backward is repeated like any other, at the price that nothing is
/// reduced during backward. Not thread-safe.
class BRIMFUL_API TorchDdpAdapter final : public Participant {
 public:
  /// Makes the gradients of its parameters the mean over the ranks, and gives all ranks the buffers of rank `source`.
  /// Called on all ranks or on none; allocations on the CPU are not refused meanwhile.
  using Reduce = std::function<void(int source)>;

  /// Of the side group, when the members of both were changed in place since the last step: they are connected anew, by
  /// all that are in it now. Null where they were not.
  using Follow = std::function<c10::intrusive_ptr<c10d::ProcessGroup>()>;

  /// `side_group`: a group for tensors on the CPU with the same ranks, which nothing else uses. `check_updates` as in
  /// ReducerOptions.
  static std::shared_ptr<TorchDdpAdapter> create(
      std::vector<at::Tensor> parameters, const c10::intrusive_ptr<c10d::ProcessGroup>& side_group,
      Reduce reduce, bool check_updates = true, Follow follow = nullptr);
  ~TorchDdpAdapter() override;
  TorchDdpAdapter(const TorchDdpAdapter&) = delete;
  TorchDdpAdapter& operator=(const TorchDdpAdapter&) = delete;

  bool follow_group() override;
  int rank() const override;
  int world_size() const override;
  int64_t step() const override;
  const std::vector<at::Tensor>& parameters() const override;
  std::vector<ControlRecord> exchange(const ControlRecord& record) override;
  std::vector<at::Tensor> gather(const at::Tensor& own) override;
  void sum(at::Tensor& tensor) override;
  const FailureBoard& board() const override;
  ParticipantAttempt& attempt() override;

 private:
  struct State;
  explicit TorchDdpAdapter(std::unique_ptr<State> state);

  std::unique_ptr<State> s_;
};

}  // namespace brimful
