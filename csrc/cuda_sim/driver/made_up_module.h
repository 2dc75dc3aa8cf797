#pragma once

namespace sim {

/// What the simulated NVRTC makes of each program, and the simulated driver takes for a module.
inline constexpr char kMadeUpModule[] = "simulated CUDA: nothing was compiled";

/// Why the driver takes no other.
inline constexpr char kNoModules[] =
    "simulated CUDA: compiled kernels are not loaded on a device without arithmetic (Triton's and "
    "those of "
    "torch.compile): run the model as it is, with TORCH_COMPILE_DISABLE=1 and without Triton's "
    "kernels";

}  // namespace sim
