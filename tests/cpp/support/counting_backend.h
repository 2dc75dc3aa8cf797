#pragma once
#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <numeric>
#include <string>
#include <vector>

namespace brimful::test {

enum class Call : uint8_t {
  allreduce,
  broadcast,
  reduce,
  allgather,
  gather,
  scatter,
  reduce_scatter,
  barrier,
  send,
  recv,
  kinds
};

/// What Python might have left in a thread.
constexpr const char* kLeftByPython = "left by Python";

/// Hands each call on to another backend and counts it.
class CountingBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit CountingBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  /// Calls of this kind, and of all kinds, since the beginning or the last `reset`.
  int count(Call kind) const { return counts_[static_cast<size_t>(kind)]; }
  int total() const { return std::accumulate(counts_.begin(), counts_.end(), 0); }
  /// Calls that would have taken along what Python left in their thread.
  int with_python() const { return with_python_; }
  void reset() {
    for (auto& count : counts_) {
      count = 0;
    }
  }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(!tensors[0].is_sparse(), "an all_reduce of a sparse tensor");
    return counted(Call::allreduce).allreduce(tensors, options);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return counted(Call::allreduce).allreduce_sparse(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return counted(Call::allreduce).allreduce_coalesced(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return counted(Call::broadcast).broadcast(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return counted(Call::reduce).reduce(tensors, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return counted(Call::allgather).allgather(outputs, inputs, options);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return counted(Call::allgather)._allgather_base(output, input, options);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return counted(Call::allgather).allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return counted(Call::allgather).allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return counted(Call::gather).gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    return counted(Call::scatter).scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return counted(Call::reduce_scatter).reduce_scatter(outputs, inputs, options);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return counted(Call::barrier).barrier(options);
  }
  WorkPtr send(Tensors& tensors, int to_rank, int tag) override {
    return counted(Call::send).send(tensors, to_rank, tag);
  }
  WorkPtr recv(Tensors& tensors, int from_rank, int tag) override {
    return counted(Call::recv).recv(tensors, from_rank, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return counted(Call::recv).recvAnysource(tensors, tag);
  }

 private:
  Backend& counted(Call kind) {
    ++counts_[static_cast<size_t>(kind)];
    with_python_ += at::impl::ThreadLocalPythonObjects::contains(kLeftByPython) ? 1 : 0;
    return *inner_;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::array<std::atomic<int>, static_cast<size_t>(Call::kinds)> counts_{};
  std::atomic<int> with_python_{0};
};

/// A process group like `group` whose calls on CPU tensors `backend` counts.
struct CountedGroup {
  explicit CountedGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& counted)
      : backend(c10::make_intrusive<CountingBackend>(counted->getBackend(c10::DeviceType::CPU))),
        group(c10::make_intrusive<c10d::ProcessGroup>(counted->getStore(), counted->getRank(),
                                                      counted->getSize())) {
    group->setDefaultBackend(counted->getBackendType());
    group->setBackend(c10::DeviceType::CPU, counted->getBackendType(), backend);
  }

  c10::intrusive_ptr<CountingBackend> backend;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

}  // namespace brimful::test
