#pragma once
#include <brimful/export.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace c10d {
class ProcessGroup;  // defined in <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}  // namespace c10d

namespace brimful::pipeline {

/// The processes of a pipeline, each with the stages of one rank.
class Peers;

/// Over gloo, and NCCL beside it for stages on CUDA devices. The pipeline uses tags from 2^24 - 5 on. The group is kept.
/// @throws c10::ValueError without a group, or without one that moves tensors of the CPU
BRIMFUL_API std::shared_ptr<Peers> peers_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brimful::pipeline
