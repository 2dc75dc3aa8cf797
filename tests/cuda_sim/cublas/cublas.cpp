// cuBLAS on a device without arithmetic: handles keep what they are told, and whatever computes is done at once. Results on
// the host, of a handle whose pointer mode is the host's, are not written.
#include <cstdint>
#include <cstdio>

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

int set(void* handle, int Handle::*field, int value) {
  if (handle == nullptr) {
    return kNotInitialized;
  }
  of(handle)->*field = value;
  return kSuccess;
}

int get(void* handle, int Handle::*field, int* value) {
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
  if (handle == nullptr) {
    return kNotInitialized;
  }
  of(handle)->stream = stream;
  return kSuccess;
}

int cublasGetStream_v2(void* handle, void** stream) {
  if (handle == nullptr) {
    return kNotInitialized;
  }
  *stream = of(handle)->stream;
  return kSuccess;
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
  const int parts[] = {kVersion / 10000, kVersion / 100 % 100, kVersion % 100};
  if (which < 0 || which > 2) {
    return kInvalidValue;
  }
  *value = parts[which];
  return kSuccess;
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
#define SIM_DONE(name)                         \
  extern "C" int sim_done_##name() asm(#name); \
  int sim_done_##name() {                      \
    return kSuccess;                           \
  }
#include "done.inc"

// The rest fails, with its name.
#define SIM_ABSENT(name)                                                                \
  extern "C" int sim_absent_##name() asm(#name);                                        \
  int sim_absent_##name() {                                                             \
    std::fprintf(stderr, "simulated CUDA: there is no " #name " without arithmetic\n"); \
    return kNotSupported;                                                               \
  }
#include "absent.inc"
