#include "workspace.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <set>

// Of ATen/cuda/CUDAContextLight.h, which includes the headers of half the toolkit.
namespace at::cuda {
size_t getChosenWorkspaceSize();
}  // namespace at::cuda

namespace sim_operators {

bool takes_workspace(const std::string& operator_name) {
  static const std::set<std::string> names = {
      "aten::addmm",    "aten::addmm.out", "aten::addmm_",  "aten::_addmm_activation",
      "aten::baddbmm",  "aten::bmm",       "aten::bmm.out", "aten::baddbmm.out",
      "aten::baddbmm_", "aten::mm",        "aten::mm.out",  "aten::_addmm_activation.out",
  };
  return names.contains(operator_name);
}

at::DataPtr workspace() {
  return c10::cuda::CUDACachingAllocator::get()->allocate(at::cuda::getChosenWorkspaceSize());
}

}  // namespace sim_operators
