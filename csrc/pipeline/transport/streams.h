#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include "pipeline/transport/channel.h"

#include <memory>

namespace brimful::pipeline {

/// The current one of this thread.
c10::Stream computing_stream(c10::Device device);
/// One that runs no kernels.
c10::Stream stream_apart(c10::Device device);
/// The stream reads or writes what belongs to another one: until it has, freed memory is not given out again.
void keep_for(const at::Tensor& tensor, const c10::Stream& stream);
std::shared_ptr<c10::Event> event_at(const c10::Stream& stream);
/// What this thread's computing stream does from now on waits for the message, and keeps the memory of what is on its device.
void await_ready(const Message& message, c10::Device device);

}  // namespace brimful::pipeline
