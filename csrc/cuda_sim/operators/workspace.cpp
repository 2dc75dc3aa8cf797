#include "workspace.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>
#include <set>

// Of ATen/cuda/CUDAContextLight.h, which includes the headers of half the toolkit.
namespace at::cuda {
size_t getChosenWorkspaceSize();
}  // namespace at::cuda

namespace sim_operators {
namespace {

/// 0: convolutions take none.
int64_t rows_of_jump() {
  static const int64_t rows = [] {
    const char* text = std::getenv("SIM_CUDA_CONV_WORKSPACE");
    return text == nullptr ? 0 : std::strtol(text, nullptr, /*base=*/10);
  }();
  return rows;
}

}  // namespace

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

bool takes_convolution_workspace(const std::string& operator_name) {
  return rows_of_jump() > 0 && (operator_name == "aten::convolution" ||
                                operator_name == "aten::convolution_overrideable" ||
                                operator_name == "aten::convolution_backward");
}

at::DataPtr convolution_workspace(const at::Tensor& input) {
  constexpr size_t kFactor = 4;
  const bool is_large = input.dim() > 0 && input.size(0) >= rows_of_jump();
  return c10::cuda::CUDACachingAllocator::get()->allocate(is_large ? input.nbytes() * kFactor
                                                                   : input.nbytes() / kFactor);
}

}  // namespace sim_operators
