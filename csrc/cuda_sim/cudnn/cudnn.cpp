// cuDNN without arithmetic, besides its backend and its recurrent nets: handles, tensors, batch normalization, dropout.
#include <cstdio>
#include <cstdlib>

#include "descriptor.h"
#include "tensor.h"
#include "version.h"
#include "without_arithmetic.h"

namespace {

using sim::kCudnnBadParam;
using sim::kCudnnNotSupported;
using sim::kCudnnSuccess;

struct Handle {
  void* stream = nullptr;
};

constexpr size_t kDescriptorBytes = 512;  // of those that are not asked what was set

}  // namespace

extern "C" {

int cudnnCreate(void** handle) {
  *handle = new Handle;
  return kCudnnSuccess;
}

int cudnnDestroy(void* handle) {
  delete static_cast<Handle*>(handle);
  return kCudnnSuccess;
}

int cudnnSetStream(void* handle, void* stream) {
  static_cast<Handle*>(handle)->stream = stream;
  return kCudnnSuccess;
}

int cudnnGetStream(void* handle, void** stream) {
  *stream = static_cast<Handle*>(handle)->stream;
  return kCudnnSuccess;
}

size_t cudnnGetVersion() {
  return sim::cudnn_version();
}

size_t cudnnGetCudartVersion() {
  return 13000;
}

int cudnnGetProperty(int which, int* value) {
  return sim::part_of_version(sim::cudnn_version(), which, value) ? kCudnnSuccess : kCudnnBadParam;
}

const char* cudnnGetErrorString(int status) {
  return status == kCudnnSuccess ? "success" : "not supported by the simulated cuDNN";
}

void cudnnGetLastErrorString(char* text, size_t bytes) {
  std::snprintf(text, bytes, "the simulated cuDNN has no more to say");
}

// --- Tensors and filters ----------------------------------------------------------------------------

int cudnnCreateTensorDescriptor(void** tensor) {
  *tensor = new sim::Tensor{};
  return kCudnnSuccess;
}

int cudnnDestroyTensorDescriptor(void* tensor) {
  delete static_cast<sim::Tensor*>(tensor);
  return kCudnnSuccess;
}

int cudnnSetTensorNdDescriptor(void* tensor, int type, int dimensions, const int* sizes,
                               const int* strides) {
  if (dimensions < 0 || dimensions > sim::kMaxDimensions) {
    return kCudnnBadParam;
  }
  static_cast<sim::Tensor*>(tensor)->set(type, dimensions, sizes, strides);
  return kCudnnSuccess;
}

int cudnnGetTensorNdDescriptor(void* tensor, int wanted, int* type, int* dimensions, int* sizes,
                               int* strides) {
  const auto* from = static_cast<sim::Tensor*>(tensor);
  *type = from->type;
  *dimensions = from->dimensions;
  for (int k = 0; k < wanted && k < from->dimensions; ++k) {
    sizes[k] = from->sizes[k];
    strides[k] = from->strides[k];
  }
  return kCudnnSuccess;
}

int cudnnCreateFilterDescriptor(void** filter) {
  return cudnnCreateTensorDescriptor(filter);
}

int cudnnDestroyFilterDescriptor(void* filter) {
  return cudnnDestroyTensorDescriptor(filter);
}

int cudnnSetFilterNdDescriptor(void* filter, int type, int /*format*/, int dimensions,
                               const int* sizes) {
  return cudnnSetTensorNdDescriptor(filter, type, dimensions, sizes, nullptr);
}

int cudnnGetFilterNdDescriptor(void* filter, int wanted, int* type, int* format, int* dimensions,
                               int* sizes) {
  int strides[sim::kMaxDimensions];
  *format = 0;
  return cudnnGetTensorNdDescriptor(filter, wanted, type, dimensions, sizes, strides);
}

// --- Batch normalization ------------------------------------------------------------------------------

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void* /*handle*/, int /*mode*/,
                                                             int /*ops*/, void* /*x*/, void* /*z*/,
                                                             void* /*y*/, void* /*scale*/,
                                                             void* /*activation*/, size_t* bytes) {
  *bytes = 0;
  return kCudnnSuccess;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void* /*handle*/, int /*mode*/, int /*ops*/,
                                                      void* /*x*/, void* /*y*/, void* /*dy*/,
                                                      void* /*dz*/, void* /*dx*/, void* /*scale*/,
                                                      void* /*activation*/, size_t* bytes) {
  *bytes = 0;
  return kCudnnSuccess;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void* /*handle*/, int /*mode*/,
                                                         int /*ops*/, void* /*activation*/,
                                                         void* /*x*/, size_t* bytes) {
  *bytes = 0;
  return kCudnnSuccess;
}

// --- Dropout ----------------------------------------------------------------------------------------

/// How large the vendor's is is not known.
int cudnnDropoutGetStatesSize(void* /*handle*/, size_t* bytes) {
  *bytes = 0;
  return kCudnnSuccess;
}
}

#define SIM_DESCRIPTOR(name)                                        \
  extern "C" int cudnnCreate##name##Descriptor(void** descriptor) { \
    *descriptor = std::calloc(1, kDescriptorBytes);                 \
    return kCudnnSuccess;                                           \
  }                                                                 \
  extern "C" int cudnnDestroy##name##Descriptor(void* descriptor) { \
    std::free(descriptor);                                          \
    return kCudnnSuccess;                                           \
  }
SIM_DESCRIPTOR(Activation)
SIM_DESCRIPTOR(CTCLoss)
SIM_DESCRIPTOR(Convolution)
SIM_DESCRIPTOR(Dropout)
SIM_DESCRIPTOR(Pooling)
SIM_DESCRIPTOR(SpatialTransformer)

// What computes, and what is set in a descriptor and not asked for again.
#define SIM_DONE(name) SIM_ANSWERS(name, kCudnnSuccess)
SIM_DONE(cudnnBatchNormalizationBackwardEx)
SIM_DONE(cudnnBatchNormalizationForwardInference)
SIM_DONE(cudnnBatchNormalizationForwardTrainingEx)
SIM_DONE(cudnnPoolingForward)
SIM_DONE(cudnnRNNBackwardData_v8)
SIM_DONE(cudnnRNNBackwardWeights_v8)
SIM_DONE(cudnnRNNForward)
SIM_DONE(cudnnRestoreDropoutDescriptor)
SIM_DONE(cudnnSetActivationDescriptor)
SIM_DONE(cudnnSetConvolutionGroupCount)
SIM_DONE(cudnnSetConvolutionMathType)
SIM_DONE(cudnnSetConvolutionNdDescriptor)
SIM_DONE(cudnnSetDropoutDescriptor)
SIM_DONE(cudnnSetPooling2dDescriptor)
SIM_DONE(cudnnSetSpatialTransformerNdDescriptor)
SIM_DONE(cudnnSpatialTfGridGeneratorBackward)
SIM_DONE(cudnnSpatialTfGridGeneratorForward)
SIM_DONE(cudnnSpatialTfSamplerBackward)
SIM_DONE(cudnnSpatialTfSamplerForward)

// The rest fails, with its name.
#define SIM_ABSENT(name) SIM_REFUSES(name, kCudnnNotSupported)
#include "absent.inc"
