#include "pipeline/transport/device_lane.h"

#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/step/oom.h>
#include <c10/core/StreamGuard.h>

#include <thread>

#include "pipeline/transport/streams.h"
#include "reducer/device_wait.h"

namespace brimful::pipeline {
namespace {
using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{10};

/// The tensor's memory as bytes: NCCL knows fewer dtypes than torch.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.view({-1}).view(at::kByte);
}
}  // namespace

// Communicators are made by their first use, in which each end waits for the other: here, where both are known to come.
DeviceLane::DeviceLane(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device, End end)
    : backend_(std::move(backend)),
      patience_(patience_of(*backend_)),
      device_(device),
      other_(end == End::sends ? 1 : 0),
      stream_(stream_apart(device)) {
  Message first;
  first.value.tensors.push_back(room({1}, at::kByte, false));
  if (end == End::sends) {
    send(first);
  } else {
    receive(first);
  }
  keep();
}

DeviceLane::~DeviceLane() {
  if (!lost_) {
    try {
      if (settled(*event_at(stream_)) && trouble().empty()) {
        backend_->abort();
        return;
      }
    } catch (const std::exception&) {  // of a device that has failed: nothing arrives any more
    }
  }
  abort();
}

bool DeviceLane::settled(const c10::Event& event) noexcept {
  const auto end = Clock::now() + kPatience;
  try {
    while (!event.query()) {
      if (Clock::now() > end || !trouble().empty()) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void DeviceLane::keep() {
  const std::lock_guard lock(mutex_);
  kept_ = event_at(stream_);
}

void DeviceLane::forget_arrived() {
  while (!under_way_.empty() && under_way_.front().end && under_way_.front().end->query()) {
    under_way_.pop_front();
  }
}

std::string DeviceLane::trouble() noexcept {
  const std::lock_guard lock(mutex_);
  if (backend_ == nullptr) {  // its rank knows
    return {};
  }
  try {
    require_no_error(*backend_);
    forget_arrived();
    const auto now = Clock::now();
    if (patience_ && !under_way_.empty() && now - under_way_.front().since > *patience_) {
      return "a message between two devices did not arrive in " +
             std::to_string(patience_->count()) + " ms";
    }
    return {};
  } catch (...) {
    return brimful::to_string(std::current_exception());
  }
}

bool DeviceLane::has_arrived() {
  const std::lock_guard lock(mutex_);
  forget_arrived();
  return under_way_.empty();
}

Clock::time_point DeviceLane::waits_since() {
  const std::lock_guard lock(mutex_);
  return under_way_.empty() || backend_ == nullptr ? Clock::now() : under_way_.front().since;
}

template <typename Move>
std::shared_ptr<c10::Event> DeviceLane::move(const Message& message, const Move& move) {
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    const std::lock_guard lock(mutex_);
    backend = backend_;
    if (backend != nullptr) {
      under_way_.push_back({Clock::now(), nullptr});
    }
  }
  if (backend == nullptr) {
    brimful::detail::throw_rank_failed(-1, -1, Status::error,
                                       "the connection between the devices of two ranks is lost");
  }
  const c10::StreamGuard guard(stream_);
  try {
    require_no_error(*backend);
    for (const auto& tensor : message.value.tensors) {
      if (tensor.defined() && tensor.device() == device_ && tensor.numel() > 0) {
        keep_for(tensor, stream_);
        std::vector<at::Tensor> bytes{as_bytes(tensor)};
        // This stream waits, and what waits for it. wait() could have the host wait (NCCL_BLOCKING_WAIT).
        move(*backend, bytes)->synchronize();
      }
    }
    const std::lock_guard lock(mutex_);
    forget_arrived();
    return under_way_.back().end = event_at(stream_);
  } catch (...) {
    lost_ = true;
    throw;
  }
}

void DeviceLane::send(const Message& message) {
  event_at(computing_stream(device_))->block(stream_);
  move(message, [&](auto& backend, auto& tensors) { return backend.send(tensors, other_, 0); });
}

at::Tensor DeviceLane::room(at::IntArrayRef sizes, at::ScalarType dtype, bool of_computing) const {
  const c10::StreamGuard guard(of_computing ? computing_stream(device_) : stream_);
  auto tensor = at::empty(sizes, at::TensorOptions(device_).dtype(dtype));
  if (of_computing) {
    event_at(computing_stream(device_))->block(stream_);
  }
  return tensor;
}

void DeviceLane::receive(Message& message) {
  message.ready =
      move(message, [&](auto& backend, auto& tensors) { return backend.recv(tensors, other_, 0); });
}

bool DeviceLane::abort() noexcept {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::shared_ptr<c10::Event> kept;
  {
    const std::lock_guard lock(mutex_);
    backend = backend_;
    kept = kept_;
  }
  if (backend == nullptr) {
    return true;
  }
  const bool arrived = settled(*kept);
  {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    backend_.reset();
  }
  try {
    backend->abort();
  } catch (const std::exception&) {  // it is to be gone, and is
  }
  // Its end waits for torch's watchdog, which sleeps for a quarter of a minute when it has found an error.
  std::thread([last = std::move(backend)] {}).detach();
  return arrived;
}

}  // namespace brimful::pipeline
