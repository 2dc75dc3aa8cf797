// Launches. torch.cuda._sleep sleeps; no other kernel is run: operators/ stands in for those of torch's operators.
#include "kernels.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "sim_cuda.h"
#include "state.h"

namespace {

constexpr long kReported = 20;
std::atomic<long> not_run{0};

/// A kernel without a stand-in: its results would be wrong from here on.
void refuse(std::string_view name) {
  if (sim::strict()) {
    std::fprintf(stderr, "SIM_CUDA_STRICT: a kernel without a CPU stand-in: %s\n", name.data());
    std::abort();
  }
  if (not_run++ < kReported) {
    std::fprintf(stderr, "simulated CUDA: kernel not run: %s\n", name.data());
  }
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  if (!sim::settings().arithmetic) {
    return cudaSuccess;
  }
  const std::string_view name = sim::kernel_name(function);
  if (name.find("spin_kernel") == std::string_view::npos) {
    refuse(name);
    return cudaSuccess;
  }
  const std::chrono::nanoseconds time(*static_cast<int64_t*>(arguments[0]));  // a cycle is one
  sim::real(stream)->enqueue([=] { std::this_thread::sleep_for(time); }, sim::When::by_thread);
  return cudaSuccess;
}

}  // namespace

extern "C" {

void sim_cuda_set_strict(int strict) {
  sim::strict() = strict != 0;
}

long sim_cuda_kernels_not_run() {
  return not_run;
}

unsigned __cudaPushCallConfiguration(dim3 /*grid*/, dim3 /*block*/, size_t /*shared*/,
                                     CUstream_st* /*stream*/) {
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 /*grid*/, dim3 /*block*/, void** arguments,
                             size_t /*shared*/, cudaStream_t stream) {
  SIM_ENTER();
  return launch(function, arguments, stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  SIM_ENTER();
  return launch(function, arguments, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 /*grid*/, dim3 /*block*/,
                                        void** arguments, size_t /*shared*/, cudaStream_t stream) {
  SIM_ENTER();
  return launch(function, arguments, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  if (!sim::settings().arithmetic) {
    cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, sim::current_device())) {
      return error;
    }
    attributes->ptxVersion = attributes->binaryVersion = sim::architecture_of_kernels(p);
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(p.sharedMemPerBlock);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/,
                                 int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* /*function*/,
                                                          int size, size_t shared) {
  *blocks = 1;
  if (sim::settings().arithmetic) {
    return cudaSuccess;
  }
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, sim::current_device())) {
    return error;
  }
  *blocks = sim::blocks_at_once(p, size, shared);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function, int size,
                                                                   size_t shared,
                                                                   unsigned /*flags*/) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}
}
