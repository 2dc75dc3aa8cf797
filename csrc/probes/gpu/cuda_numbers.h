#pragma once
#include <string>
#include <vector>
#include "probes/gpu/reader.h"

namespace brimful::probes {

/// Sets cuda_index: by UUID where CUDA runs in this process, else by what CUDA will make of the environment. Returns why
/// that is not certain, or nothing.
std::string number_as_cuda_does(const GpuSurroundings& around, std::vector<Gpu>& gpus);

}  // namespace brimful::probes
