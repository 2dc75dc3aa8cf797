#pragma once
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

namespace brimful::test {

/// A communicator of two ranks, which are threads of this process with tensors on slow_device, that behaves as NCCL's:
/// what is asked for happens on a stream of its own, one behind the other, a send when its receive has come to the same
/// point and the other way round; where both ends do not want the same, it never happens. `synchronize()` makes the
/// current stream wait, and no host. The first call waits for the other end's. abort() ends what hangs, at this end alone.
class FakeNccl : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// What both ends have in common, by name.
  struct Pair;
  FakeNccl(const std::string& name, int end);
  ~FakeNccl() override;

  const std::string getBackendName() const override { return "fake nccl"; }
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  void abort() override;
  c10d::ErrorType getError() override;

  /// Calls of abort(), of all.
  static std::atomic<int> aborts;
  /// Calls that fail from now on, of all: each send or receive of theirs throws.
  static std::atomic<int> failures_left;
  /// An end, 0 or 1, of every pair that has found an error; -1: none.
  static std::atomic<int> broken_end;

 private:
  WorkPtr enqueue(at::Tensor tensor, bool sends);

  std::shared_ptr<Pair> pair_;
  std::optional<c10::Stream> stream_;
  int next_ = 0;
};

}  // namespace brimful::test
