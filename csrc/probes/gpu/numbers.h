#pragma once
#include <vector>
#include "probes/gpu/nvml.h"
#include "probes/gpu/reader.h"

namespace brimful::probes {

/// Adds GPU `index`, and its MIG instances behind it, with what the driver reports of each; not their numbers in CUDA.
void read_gpu(const nvml::Library& library, const GpuSurroundings& around, int index,
              std::vector<Gpu>& gpus);

}  // namespace brimful::probes
