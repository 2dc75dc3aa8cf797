// cuBLASLt on a device without arithmetic: descriptors keep nothing, and the one algorithm that there is needs no workspace
// of its own. torch allocates the workspace that it offers before it asks.
#include <cstdint>
#include <cstdlib>

#include "without_arithmetic.h"

namespace {

enum { kSuccess = 0, kAllocFailed = 3, kNotSupported = 15 };

/// As cublasLt.h has it.
struct Result {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

constexpr size_t kDescriptorBytes = 256;  // of the largest

int create(void** descriptor) {
  *descriptor = std::calloc(1, kDescriptorBytes);
  return *descriptor == nullptr ? kAllocFailed : kSuccess;
}

}  // namespace

extern "C" {

int cublasLtCreate(void** handle) {
  return create(handle);
}

int cublasLtMatmulDescCreate(void** descriptor, int /*compute*/, int /*scale*/) {
  return create(descriptor);
}

int cublasLtMatrixLayoutCreate(void** layout, int /*type*/, uint64_t /*rows*/, uint64_t /*columns*/,
                               int64_t /*leading*/) {
  return create(layout);
}

int cublasLtMatmulPreferenceCreate(void** preference) {
  return create(preference);
}

int cublasLtMatrixTransformDescCreate(void** descriptor, int /*scale*/) {
  return create(descriptor);
}

int cublasLtDestroy(void* of) {
  std::free(of);
  return kSuccess;
}

int cublasLtMatmulDescDestroy(void* of) {
  return cublasLtDestroy(of);
}

int cublasLtMatrixLayoutDestroy(void* of) {
  return cublasLtDestroy(of);
}

int cublasLtMatmulPreferenceDestroy(void* of) {
  return cublasLtDestroy(of);
}

int cublasLtMatrixTransformDescDestroy(void* of) {
  return cublasLtDestroy(of);
}

int cublasLtMatmulAlgoGetHeuristic(void* /*handle*/, void* /*product*/, void* /*a*/, void* /*b*/,
                                   void* /*c*/, void* /*d*/, void* /*preference*/, int wanted,
                                   Result* results, int* found) {
  *found = wanted < 1 ? 0 : 1;
  if (*found == 1) {
    *results = {};
    results->waves = 1;
  }
  return kSuccess;
}

size_t cublasLtGetVersion() {
  return 130000;
}

size_t cublasLtGetCudartVersion() {
  return 13000;
}

const char* cublasLtGetStatusName(int status) {
  return status == kSuccess ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED";
}

const char* cublasLtGetStatusString(int status) {
  return status == kSuccess ? "success" : "not supported by the simulated cuBLASLt";
}
}

// What computes, and what is set in a descriptor.
#define SIM_DONE(name) SIM_ANSWERS(name, kSuccess)
SIM_DONE(cublasLtMatmul)
SIM_DONE(cublasLtMatrixTransform)
SIM_DONE(cublasLtMatmulDescSetAttribute)
SIM_DONE(cublasLtMatrixLayoutSetAttribute)
SIM_DONE(cublasLtMatmulPreferenceSetAttribute)
SIM_DONE(cublasLtMatrixTransformDescSetAttribute)

// The rest fails, with its name.
#define SIM_ABSENT(name) SIM_REFUSES(name, kNotSupported)
#include "lt_absent.inc"
