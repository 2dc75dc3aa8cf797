#pragma once
#include <brimful/export.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>

namespace brimful::launch {

enum class GlooDevice : uint8_t { loopback, of_host };

/// A process group over gloo for CPU tensors (and CUDA tensors, which gloo stages through the
/// host). Blocks until all ranks have joined. @throws c10::NotImplementedError without gloo
BRIMFUL_API c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, GlooDevice device,
    std::chrono::milliseconds timeout);

}  // namespace brimful::launch
