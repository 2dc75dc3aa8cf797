#include "pipeline/transport/streams.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace brimful::pipeline {

c10::Stream computing_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream stream_apart(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void keep_for(const at::Tensor& tensor, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

std::shared_ptr<c10::Event> event_at(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return event;
}

void await_ready(const Message& message, c10::Device device) {
  const auto stream = computing_stream(device);
  message.ready->block(stream);
  for (const auto& tensor : message.value.tensors) {
    if (tensor.defined() && tensor.device() == device && tensor.has_storage()) {
      keep_for(tensor, stream);
    }
  }
}

}  // namespace brimful::pipeline
