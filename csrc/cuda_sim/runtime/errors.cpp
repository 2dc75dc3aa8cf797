// The last error, and the errors' names and texts.
#include "state.h"

namespace {

struct Text {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define SIM_ERROR(name, text) \
  { name, #name, text }
constexpr Text kTexts[] = {
    SIM_ERROR(cudaSuccess, "no error"),
    SIM_ERROR(cudaErrorInvalidValue, "invalid argument"),
    SIM_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    SIM_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    SIM_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    SIM_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    SIM_ERROR(cudaErrorNotReady, "device not ready"),
    SIM_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    SIM_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    SIM_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    SIM_ERROR(cudaErrorAssert, "device-side assert triggered"),
    SIM_ERROR(cudaErrorNotSupported, "operation not supported"),
    SIM_ERROR(cudaErrorStreamCaptureUnsupported,
              "simulated CUDA: there are no CUDA graphs on a device without arithmetic: run the "
              "step itself, without "
              "torch.cuda.graph and make_graphed_callables"),
};

const Text* find(cudaError_t error) {
  for (const Text& known : kTexts) {
    if (known.error == error) {
      return &known;
    }
  }
  return nullptr;
}

}  // namespace

extern "C" {

cudaError_t cudaPeekAtLastError() {
  const cudaError_t error = sim::sticky();
  return error == cudaSuccess ? sim::peek_last() : error;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = sim::sticky();
  const cudaError_t last = sim::take_last();
  return error == cudaSuccess ? last : error;
}

const char* cudaGetErrorName(cudaError_t error) {
  const Text* known = find(error);
  return known == nullptr ? "cudaErrorUnknown" : known->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const Text* known = find(error);
  return known == nullptr ? "unknown error" : known->text;
}
}
