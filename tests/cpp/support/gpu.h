#pragma once
// Include after support/catch.h.
#include "launch/nccl_group.h"

/// Ends the test where there are fewer CUDA devices; on the simulated ones CTest takes that for a failure.
#define BRIMFUL_NEEDS_GPUS(count)                                                                 \
  if (brimful::launch::nccl_device_count() < (count)) {                                           \
    WARN("skipped: needs CUDA devices (needed: " << (count) << ", here: "                         \
                                                 << brimful::launch::nccl_device_count() << ")"); \
    return;                                                                                       \
  }                                                                                               \
  static_assert(true, "")
