#include "support/fake_nccl.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <map>
#include <set>

#include "support/slow_device.h"

namespace brimful::test {
namespace {
struct Move {
  bool sends = false;
  char* data = nullptr;
  size_t bytes = 0;

  bool fits(const Move& other) const { return sends != other.sends && bytes == other.bytes; }
};

c10::Event event_at(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

/// Keeps its tensor until a thread waits, as ProcessGroupNCCL's does.
class FakeWork : public c10d::Work {
 public:
  FakeWork(at::Tensor tensor, c10::Event done)
      : device_(tensor.device()), tensor_(std::move(tensor)), done_(std::move(done)) {}
  void synchronize() override {
    done_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    tensor_.reset();
  }

 private:
  c10::Device device_;
  at::Tensor tensor_;
  c10::Event done_;
};
}  // namespace

struct FakeNccl::Pair {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<bool, 2> here{};
  std::array<bool, 2> aborted{};
  std::array<std::map<int, Move>, 2> moves;
  std::set<int> done;

  static std::shared_ptr<Pair> of(const std::string& name) {
    static std::mutex mutex;
    static auto* const pairs = new std::map<std::string, std::weak_ptr<Pair>>;
    const std::lock_guard lock(mutex);
    auto pair = (*pairs)[name].lock();
    if (!pair) {
      (*pairs)[name] = pair = std::make_shared<Pair>();
    }
    return pair;
  }

  void meet(int end) {
    std::unique_lock lock(mutex);
    here[end] = true;
    changed.notify_all();
    TORCH_CHECK(changed.wait_for(lock, std::chrono::seconds(10), [&] { return here[1 - end]; }),
                "the other end of a communicator did not come");
  }

  /// By the end's stream.
  void run(int end, int number, const Move& own) {
    std::unique_lock lock(mutex);
    moves[end][number] = own;
    changed.notify_all();
    const auto& others = moves[1 - end];
    changed.wait(lock, [&] {
      const auto other = others.find(number);
      return aborted[end] || (other != others.end() && other->second.fits(own));
    });
    if (aborted[end]) {
      return;
    }
    if (!own.sends) {
      const auto* const from = others.at(number).data;
      for (size_t i = 0; i < own.bytes; ++i) {  // what goes wrong on purpose is no race
        const auto byte =
            std::atomic_ref(const_cast<char&>(from[i])).load(std::memory_order_relaxed);
        std::atomic_ref(own.data[i]).store(byte, std::memory_order_relaxed);
      }
      done.insert(number);
      changed.notify_all();
    }
    changed.wait(lock, [&] { return aborted[end] || done.count(number) > 0; });
  }
};

std::atomic<int> FakeNccl::aborts{0};
std::atomic<int> FakeNccl::failures_left{0};
std::atomic<int> FakeNccl::broken_end{-1};

FakeNccl::FakeNccl(const std::string& name, int end) : Backend(end, 2), pair_(Pair::of(name)) {}
FakeNccl::~FakeNccl() = default;

FakeNccl::WorkPtr FakeNccl::enqueue(at::Tensor tensor, bool sends) {
  const int end = getRank();
  const auto device = tensor.device();
  TORCH_CHECK(!pair_->aborted[end], "a communicator that was aborted");
  if (failures_left > 0) {
    --failures_left;
    TORCH_CHECK(false, "planted in a communicator");
  }
  if (next_ == 0) {
    pair_->meet(end);
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
  event_at(c10::impl::VirtualGuardImpl(device.type()).getStream(device)).block(*stream_);
  const c10::StreamGuard guard(*stream_);
  const Move own{sends,
                 static_cast<char*>(tensor.storage().mutable_data()) +
                     tensor.storage_offset() * tensor.itemsize(),
                 tensor.nbytes()};
  slow_device::enqueue(device,
                       [pair = pair_, end, number = next_++, own] { pair->run(end, number, own); });
  return c10::make_intrusive<FakeWork>(std::move(tensor), event_at(*stream_));
}

FakeNccl::WorkPtr FakeNccl::send(Tensors& tensors, int /*to*/, int /*tag*/) {
  return enqueue(tensors.at(0), true);
}

FakeNccl::WorkPtr FakeNccl::recv(Tensors& tensors, int /*from*/, int /*tag*/) {
  return enqueue(tensors.at(0), false);
}

void FakeNccl::abort() {
  ++aborts;
  {
    const std::lock_guard lock(pair_->mutex);
    pair_->aborted[getRank()] = true;
  }
  pair_->changed.notify_all();
}

c10d::ErrorType FakeNccl::getError() {
  return getRank() == broken_end ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

}  // namespace brimful::test
