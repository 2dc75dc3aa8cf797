#pragma once
#include <c10/core/Device.h>

namespace brimful {

/// A step decides on the host, by what it finds, whether it is repeated: a graph would replay one of its ways.
/// @throws c10::Error while this thread's stream is captured into a CUDA graph
void require_no_capture(c10::Device device, const char* what);

}  // namespace brimful
