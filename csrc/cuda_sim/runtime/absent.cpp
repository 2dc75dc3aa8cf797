// The rest of the runtime: graphs, memory pools, IPC, libraries, managed memory and more. They are here so that every
// torch for this CUDA loads; each call is an error that torch raises.
#include "state.h"

// The headers declare them with their arguments, so they are defined under other names.
#define SIM_ABSENT(name)                                 \
  extern "C" cudaError_t sim_absent_##name() asm(#name); \
  cudaError_t sim_absent_##name() {                      \
    return sim::fail(cudaErrorNotSupported);             \
  }
#include "absent.inc"
