// The rest of NCCL: windows, growing and shrinking, one-sided messages and more.
#include <nccl.h>

// nccl.h declares some with their arguments, so they are defined under other names.
#define SIM_ABSENT(name)                                                                         \
  extern "C" __attribute__((visibility("default"))) ncclResult_t sim_absent_##name() asm(#name); \
  ncclResult_t sim_absent_##name() {                                                             \
    return ncclInvalidUsage;                                                                     \
  }
#include "absent.inc"
