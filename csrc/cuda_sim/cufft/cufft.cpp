// cuFFT on a device without arithmetic: plans are made and say a workspace, and transforms are done at once.
#include <library_types.h>

#include <cstddef>
#include <map>
#include <mutex>

#include "without_arithmetic.h"

namespace {

enum {
  kSuccess = 0,
  kInvalidPlan = 1,
  kInvalidType = 3,
  kInvalidValue = 4,
  kInvalidSize = 8,
  kNotSupported = 16
};
constexpr int kVersion = 12000;

struct Plans {
  std::mutex mutex;
  int last = 0;
  std::map<int, size_t> workspaces;  // bytes, by plan
};

Plans& plans() {
  static auto* all = new Plans;
  return *all;
}

/// The bytes of a complex number of this type; 0 for a type that no transform is made in.
size_t complex_bytes(cudaDataType type) {
  switch (type) {
    case CUDA_R_64F:
    case CUDA_C_64F:
      return 16;
    case CUDA_R_32F:
    case CUDA_C_32F:
      return 8;
    case CUDA_R_16F:
    case CUDA_C_16F:
    case CUDA_R_16BF:
    case CUDA_C_16BF:
      return 4;
    default:
      return 0;
  }
}

int known(int plan) {
  const std::lock_guard lock(plans().mutex);
  return plans().workspaces.count(plan) == 1 ? kSuccess : kInvalidPlan;
}

}  // namespace

extern "C" {

int cufftCreate(int* plan) {
  const std::lock_guard lock(plans().mutex);
  *plan = ++plans().last;
  plans().workspaces[*plan] = 0;
  return kSuccess;
}

int cufftDestroy(int plan) {
  const std::lock_guard lock(plans().mutex);
  return plans().workspaces.erase(plan) == 1 ? kSuccess : kInvalidPlan;
}

/// The workspace is a stated figure: a complex number for each point of each transform.
int cufftXtMakePlanMany(int plan, int rank, long long* points, long long* /*from_embed*/,
                        long long /*from_stride*/, long long /*from_distance*/,
                        cudaDataType /*from*/, long long* /*to_embed*/, long long /*to_stride*/,
                        long long /*to_distance*/, cudaDataType /*to*/, long long transforms,
                        size_t* workspace, cudaDataType computed_in) {
  size_t bytes = complex_bytes(computed_in);
  if (bytes == 0) {
    return kInvalidType;
  }
  if (rank < 1 || rank > 3 || transforms < 1) {
    return kInvalidValue;
  }
  for (int i = 0; i < rank; ++i) {
    if (points[i] < 1) {
      return kInvalidSize;
    }
    bytes *= static_cast<size_t>(points[i]);
  }
  bytes *= static_cast<size_t>(transforms);
  const std::lock_guard lock(plans().mutex);
  const auto found = plans().workspaces.find(plan);
  if (found == plans().workspaces.end()) {
    return kInvalidPlan;
  }
  *workspace = found->second = bytes;
  return kSuccess;
}

int cufftGetSize(int plan, size_t* bytes) {
  const std::lock_guard lock(plans().mutex);
  const auto found = plans().workspaces.find(plan);
  if (found == plans().workspaces.end()) {
    return kInvalidPlan;
  }
  *bytes = found->second;
  return kSuccess;
}

int cufftSetAutoAllocation(int plan, int /*allocates*/) {
  return known(plan);
}

int cufftSetStream(int plan, void* /*stream*/) {
  return known(plan);
}

int cufftSetWorkArea(int plan, void* /*workspace*/) {
  return known(plan);
}

int cufftXtExec(int plan, void* /*from*/, void* /*to*/, int /*direction*/) {
  return known(plan);
}

int cufftGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

int cufftGetProperty(int which, int* value) {
  const int parts[] = {kVersion / 1000, kVersion / 100 % 10, kVersion % 100};
  if (which < 0 || which > 2) {
    return kInvalidType;
  }
  *value = parts[which];
  return kSuccess;
}
}

// What transforms in other ways, and the rest, fails with its name.
#define SIM_ABSENT(name) SIM_REFUSES(name, kNotSupported)
#include "absent.inc"
