#include "support/slow_device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace brimful::test::slow_device {
namespace {
constexpr auto kType = c10::DeviceType::PrivateUse1;
using Key = std::pair<int, c10::StreamId>;

Faults faults;

/// Ends its work before it goes.
class Queue {
 public:
  explicit Queue(uint32_t seed) : naps_(seed), thread_([this] { work(); }) {}
  ~Queue() {
    push({});
    thread_.join();
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  void push(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    while (true) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return !tasks_.empty(); });
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(naps_() % 200));
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::mt19937 naps_;
  std::thread thread_;  // last: it uses all of the above
};

struct Happening {
  std::mutex mutex;
  std::condition_variable wake;
  bool done = false;

  void happen() {
    {
      const std::lock_guard lock(mutex);
      done = true;
    }
    wake.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    wake.wait(lock, [this] { return done; });
  }
};
using Event = std::shared_ptr<Happening>;

class Queues {
 public:
  Queue& of(const Key& key) {
    const std::lock_guard lock(mutex_);
    auto& queue = queues_[key];
    if (queue == nullptr) {
      queue = std::make_unique<Queue>(static_cast<uint32_t>(queues_.size()));
    }
    return *queue;
  }
  c10::StreamId next() {
    const std::lock_guard lock(mutex_);
    return ++last_;
  }
  std::vector<Key> keys() {
    const std::lock_guard lock(mutex_);
    std::vector<Key> keys;
    for (const auto& [key, queue] : queues_) {
      keys.push_back(key);
    }
    return keys;
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::unique_ptr<Queue>> queues_;
  c10::StreamId last_ = 0;
};

Queues& queues() {
  static auto* const queues = new Queues;  // tensors may be freed at any time of the exit
  return *queues;
}

Event record_on(const Key& key) {
  auto event = std::make_shared<Happening>();
  queues().of(key).push([event] { event->happen(); });
  return event;
}

void block_on(const Key& key, const Event& event) {
  queues().of(key).push([event] { event->wait(); });
}

thread_local int current_device = 0;
thread_local int refusals_left = 0;
std::atomic<int8_t> devices_told{0};  // each gives autograd's engine a thread
thread_local std::map<int, c10::StreamId> current_streams;

Key current(int device) {
  return {device, current_streams[device]};
}

class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, refusals_left == 0 || --refusals_left < 0,
                     "no memory was planted");
    const auto key = current(current_device);
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current_device));
    const std::lock_guard lock(mutex_);
    auto& free = free_[{key, bytes}];
    void* data = nullptr;
    if (free.empty()) {
      data = std::malloc(std::max<size_t>(bytes, 1));
    } else {
      data = free.back();
      free.pop_back();
    }
    blocks_[data] = {key, bytes, {}};
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  void record(void* data, const Key& key) {
    const std::lock_guard lock(mutex_);
    auto& block = blocks_.at(data);
    if (block.key != key && key.first != faults.uses_unknown_to_memory) {
      block.users.insert(key);
    }
  }

 private:
  struct Block {
    Key key;
    size_t bytes = 0;
    std::set<Key> users;
  };
  static void release(void* data);
  void give_back(void* data, const Block& block) {
    const std::lock_guard lock(mutex_);
    free_[{block.key, block.bytes}].push_back(data);
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::pair<Key, size_t>, std::vector<void*>> free_;
};

Memory& memory() {
  static auto* const memory = new Memory;
  return *memory;
}

void Memory::release(void* data) {
  auto& self = memory();
  std::unique_lock lock(self.mutex_);
  const auto block = self.blocks_.at(data);
  self.blocks_.erase(data);
  lock.unlock();
  const auto last =
      std::shared_ptr<void>(nullptr, [&self, data, block](void*) { self.give_back(data, block); });
  for (const auto& user : block.users) {
    queues().of(user).push([last] {});
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(current_device); }
  void setDevice(c10::Device to) const override { current_device = std::max<int>(to.index(), 0); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    current_device = std::max<int>(to.index(), 0);
  }
  c10::Stream stream(const Key& key) const {
    return c10::Stream(c10::Stream::UNSAFE, device(key.first), key.second);
  }
  c10::Stream getStream(c10::Device of) const override { return stream(current(of.index())); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream({of.index(), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*high*/) const override {
    return stream({of.index(), queues().next()});
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current_streams[to.device_index()] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices_told; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    delete static_cast<Event*>(*event);
    *event = new Event(record_on({on.device_index(), on.id()}));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event != nullptr && on.device_index() != faults.waits_for_no_event) {
      block_on({on.device_index(), on.id()}, *static_cast<Event*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    auto& happening = **static_cast<Event*>(event);
    const std::lock_guard lock(happening.mutex);
    return happening.done;
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    memory().record(data.get(), {on.device_index(), on.id()});
  }
};

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> on,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(on.value_or(device(current_device)));
  return at::detail::empty_generic(size, &memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> on, std::optional<bool> /*pinned*/) {
  const c10::DeviceGuard guard(on.value_or(device(current_device)));
  return at::detail::empty_strided_generic(size, strides, &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

/// What goes wrong on purpose is no race.
void copy_bytes(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    const std::atomic_ref source(static_cast<char*>(const_cast<void*>(from))[i]);
    std::atomic_ref(static_cast<char*>(to)[i])
        .store(source.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
}

/// Contiguous tensors of one dtype, as CUDA copies them: between two devices the current streams of both wait.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto bytes = from.nbytes();
  auto* const target = to.mutable_data_ptr();
  if (from.is_cpu()) {
    const auto staged = std::make_shared<std::vector<char>>(bytes);
    std::memcpy(staged->data(), from.const_data_ptr(), bytes);
    const auto key = current(to.device().index());
    queues().of(key).push([=] { copy_bytes(target, staged->data(), bytes); });
    if (!non_blocking) {
      record_on(key)->wait();
    }
    return to;
  }
  const auto* const source = from.const_data_ptr();
  const auto key = current(from.device().index());
  const auto other = to.is_cpu() ? key : current(to.device().index());
  if (other != key) {
    block_on(key, record_on(other));
  }
  queues().of(key).push([=] { copy_bytes(target, source, bytes); });
  if (to.is_cpu()) {
    record_on(key)->wait();
  } else if (other != key) {
    block_on(other, record_on(key));
  }
  return to;
}
}  // namespace

c10::Device device(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

void install(const Faults& wanted) {
  faults = wanted;
  static const bool once = [] {
    static const Guard guard;
    static const c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1,
                                  __FILE__, __LINE__);
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("_copy_from", &copy_from);
    library.impl("view", &at::native::view);
    return true;
  }();
  (void)once;
}

void tell_engine(int devices) {
  devices_told = static_cast<int8_t>(devices);
}

void refuse_memory(int times) {
  refusals_left = times;
}

void enqueue(c10::Device on, std::function<void()> work) {
  queues().of(current(on.index())).push(std::move(work));
}

void drain() {
  for (const auto& key : queues().keys()) {
    record_on(key)->wait();
  }
}

}  // namespace brimful::test::slow_device
