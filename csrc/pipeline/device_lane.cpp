#include "pipeline/device_lane.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <thread>

#include "pipeline/streams.h"

namespace brimful::pipeline {
namespace {
constexpr std::chrono::seconds kPatience{10};

/// The tensor's memory as bytes: NCCL knows fewer dtypes than torch.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.view({-1}).view(at::kByte);
}
}  // namespace

// Communicators are made by their first use, in which each end waits for the other: here, where both are known to come.
DeviceLane::DeviceLane(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device, End end)
    : backend_(std::move(backend)),
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
      settled(*event_at(stream_));
    } catch (const std::exception&) {  // of a device that has failed: nothing arrives any more
    }
  }
  abort();
}

bool DeviceLane::settled(const c10::Event& event) const noexcept {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  try {
    while (!event.query()) {
      if (std::chrono::steady_clock::now() > end) {
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
  kept_ = event_at(stream_);
}

template <typename Move>
void DeviceLane::move(const Message& message, const Move& move) {
  TORCH_CHECK(backend_ != nullptr, "the way between the devices of two ranks is gone");
  const c10::StreamGuard guard(stream_);
  try {
    for (const auto& tensor : message.value.tensors) {
      if (tensor.defined() && tensor.device() == device_ && tensor.numel() > 0) {
        keep_for(tensor, stream_);
        std::vector<at::Tensor> bytes{as_bytes(tensor)};
        // This stream waits, and what waits for it. wait() could have the host wait (NCCL_BLOCKING_WAIT).
        move(bytes)->synchronize();
      }
    }
  } catch (...) {
    lost_ = true;
    throw;
  }
}

void DeviceLane::send(const Message& message) {
  event_at(computing_stream(device_))->block(stream_);
  move(message, [&](auto& tensors) { return backend_->send(tensors, other_, 0); });
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
  move(message, [&](auto& tensors) { return backend_->recv(tensors, other_, 0); });
  message.ready = event_at(stream_);
}

void DeviceLane::abort() noexcept {
  if (backend_ == nullptr) {
    return;
  }
  settled(*kept_);
  lost_ = true;
  try {
    backend_->abort();
  } catch (const std::exception&) {  // it is to be gone, and is
  }
  backend_.reset();
}

}  // namespace brimful::pipeline
