#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

namespace brimful::pipeline {

/// A communicator of NCCL for two ranks of `group` alone, with the timeout that its own has. `end`: 0 or 1, this process's
/// rank in it. They meet in its first use, not here. nccl_pair_absent.cpp where there are no headers of CUDA.
/// @throws c10::NotImplementedError in a build without CUDA
c10::intrusive_ptr<c10d::Backend> nccl_pair(c10d::ProcessGroup& group, const std::string& name,
                                            int end);

}  // namespace brimful::pipeline
