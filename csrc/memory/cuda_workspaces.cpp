#include <ATen/cuda/CUDAContextLight.h>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include "memory/cuda.h"

namespace brimful::memory {
namespace {

using Sized = std::pair<at::DataPtr, size_t>;
using UsualBytes = size_t (*)();

const at::DataPtr* pointer_of(const Sized& workspace) {
  return &workspace.first;
}

size_t size_of(const Sized& workspace, UsualBytes /*usual*/) {
  return workspace.second;
}

// Of a torch that does not keep the size.
[[maybe_unused]] const at::DataPtr* pointer_of(const at::DataPtr& workspace) {
  return &workspace;
}

[[maybe_unused]] size_t size_of(const at::DataPtr& /*workspace*/, UsualBytes usual) {
  return usual();
}

void add(std::vector<CudaWorkspace>& found, at::cuda::WorkspaceMapWithMutex& kept,
         c10::Device device, UsualBytes usual) {
  // Not waited for: this thread may have it, where memory runs out for a workspace that torch is about to keep.
  const std::shared_lock lock(kept.mutex, std::try_to_lock);
  if (!lock) {
    return;
  }
  for (const auto& [handle_and_stream, workspace] : kept.map) {
    const auto* const pointer = pointer_of(workspace);
    if (pointer->device() == device) {
      found.push_back({pointer->get(), static_cast<int64_t>(size_of(workspace, usual))});
    }
  }
}

}  // namespace

std::vector<CudaWorkspace> cuda_workspaces(c10::Device device) {
  std::vector<CudaWorkspace> found;
  add(found, at::cuda::cublas_handle_stream_to_workspace(), device,
      &at::cuda::getChosenWorkspaceSize);
  add(found, at::cuda::cublaslt_handle_stream_to_workspace(), device,
      &at::cuda::getCUDABlasLtWorkspaceSize);
  return found;
}

}  // namespace brimful::memory
