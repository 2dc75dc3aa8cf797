// cuBLAS on a device without arithmetic: handles keep what is set, and whatever computes is done at once. Results on
// the host, of a handle whose pointer mode is the host's, are not written.
#include <cstddef>

#include "without_arithmetic.h"

namespace {

enum { kSuccess = 0, kNotInitialized = 1, kInvalidValue = 7, kNotSupported = 15 };
constexpr int kVersion = 130000;

struct Handle {
  void* stream = nullptr;
  int math_mode = 0, pointer_mode = 0, atomics_mode = 0, multiprocessors = 0;
};

Handle* of(void* handle) {
  return static_cast<Handle*>(handle);
}

template <typename T>
int set(void* handle, T Handle::*field, T value) {
  if (handle == nullptr) {
    return kNotInitialized;
  }
  of(handle)->*field = value;
  return kSuccess;
}

template <typename T>
int get(void* handle, T Handle::*field, T* value) {
  if (handle == nullptr) {
    return kNotInitialized;
  }
  *value = of(handle)->*field;
  return kSuccess;
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = new Handle;
  return kSuccess;
}

int cublasDestroy_v2(void* handle) {
  delete of(handle);
  return kSuccess;
}

int cublasSetStream_v2(void* handle, void* stream) {
  return set(handle, &Handle::stream, stream);
}

int cublasGetStream_v2(void* handle, void** stream) {
  return get(handle, &Handle::stream, stream);
}

/// torch gives one of its own: nothing is allocated here.
int cublasSetWorkspace_v2(void* handle, void* /*workspace*/, size_t /*bytes*/) {
  return handle == nullptr ? kNotInitialized : kSuccess;
}

int cublasSetMathMode(void* handle, int mode) {
  return set(handle, &Handle::math_mode, mode);
}

int cublasGetMathMode(void* handle, int* mode) {
  return get(handle, &Handle::math_mode, mode);
}

int cublasSetPointerMode_v2(void* handle, int mode) {
  return set(handle, &Handle::pointer_mode, mode);
}

int cublasGetPointerMode_v2(void* handle, int* mode) {
  return get(handle, &Handle::pointer_mode, mode);
}

int cublasSetAtomicsMode(void* handle, int mode) {
  return set(handle, &Handle::atomics_mode, mode);
}

int cublasGetAtomicsMode(void* handle, int* mode) {
  return get(handle, &Handle::atomics_mode, mode);
}

int cublasSetSmCountTarget(void* handle, int multiprocessors) {
  return set(handle, &Handle::multiprocessors, multiprocessors);
}

int cublasGetSmCountTarget(void* handle, int* multiprocessors) {
  return get(handle, &Handle::multiprocessors, multiprocessors);
}

int cublasGetVersion_v2(void* /*handle*/, int* version) {
  *version = kVersion;
  return kSuccess;
}

int cublasGetProperty(int which, int* value) {
  return sim::part_of_version(kVersion, which, value) ? kSuccess : kInvalidValue;
}

size_t cublasGetCudartVersion() {
  return 13000;
}

const char* cublasGetStatusName(int status) {
  return status == kSuccess ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED";
}

const char* cublasGetStatusString(int status) {
  return status == kSuccess ? "success" : "not supported by the simulated cuBLAS";
}
}

// What computes.
#define SIM_DONE(name) SIM_ANSWERS(name, kSuccess)
#include "done.inc"

// The rest fails, with its name.
#define SIM_ABSENT(name) SIM_REFUSES(name, kNotSupported)
#include "absent.inc"
