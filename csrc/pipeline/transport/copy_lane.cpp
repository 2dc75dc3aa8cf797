#include "pipeline/transport/copy_lane.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "pipeline/transport/streams.h"

namespace brimful::pipeline {

std::optional<CopyLane> CopyLane::between(c10::Device from, c10::Device to) {
  const bool is_same = from == to || (from.is_cpu() && to.is_cpu());  // cpu and cpu:0 are one
  return is_same ? std::nullopt : std::optional<CopyLane>(CopyLane(from, to));
}

CopyLane::CopyLane(c10::Device from, c10::Device to) : from_(from), to_(to) {
  for (const auto device : {from, to}) {
    if (!device.is_cpu()) {
      streams_.push_back(stream_apart(device));
    }
  }
}

// Others, such as sparse ones, are moved by whoever takes the message, on the streams that it computes on.
bool CopyLane::takes(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.device() == from_ && tensor.layout() == at::kStrided &&
         tensor.has_storage();
}

// A copy between two devices begins when the current streams of both have come to it, and both wait for its end.
void CopyLane::copy_all(Message& message) const {
  const c10::MultiStreamGuard guard(streams_);
  for (auto& tensor : message.value.tensors) {
    if (takes(tensor)) {
      if (!from_.is_cpu()) {
        keep_for(tensor, streams_.front());
      }
      tensor = tensor.to(to_, /*non_blocking=*/!to_.is_cpu());
    }
  }
}

void CopyLane::depart(Message& message) const {
  if (!from_.is_cpu()) {
    message.ready = event_at(computing_stream(from_));
  }
  if (!to_.is_cpu()) {
    begin(message);
  }
}

void CopyLane::begin(Message& message) const {
  if (message.ready != nullptr) {
    message.ready->block(streams_.front());
  }
  copy_all(message);
  message.ready = event_at(streams_.back());
}

void CopyLane::fetch(Message& message) const {
  if (!to_.is_cpu()) {
    begin(message);
  }
  arrive(message);
}

void CopyLane::arrive(Message& message) const {
  if (to_.is_cpu()) {
    message.ready->block(streams_.front());
    return copy_all(message);
  }
  await_ready(message, to_);
}

Message left_at(at::Tensor tensor) {
  Message message;
  if (tensor.defined() && !tensor.is_cpu()) {
    message.ready = event_at(computing_stream(tensor.device()));
  }
  message.value.tensors.push_back(std::move(tensor));
  return message;
}

at::Tensor CopyLanes::fetch(Message message, c10::Device device) {
  auto& tensor = message.value.tensors[0];
  if (!tensor.defined()) {
    return tensor;
  }
  if (const auto& lane = between(tensor.device(), device)) {
    lane->fetch(message);
  }
  return tensor.device() == device ? tensor : tensor.to(device);
}

const std::optional<CopyLane>& CopyLanes::between(c10::Device from, c10::Device to) {
  const std::hash<c10::Device> key;
  const std::lock_guard lock(mutex_);
  const auto [place, fresh] = lanes_.try_emplace({key(from), key(to)});
  if (fresh) {
    place->second = CopyLane::between(from, to);
  }
  return place->second;
}

}  // namespace brimful::pipeline
