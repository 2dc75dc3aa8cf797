// The runtime's functions of streams. Nothing is captured into a graph (see absent.cpp): a test says whether it is.
#include <algorithm>
#include <chrono>
#include <utility>

#include "sim_cuda.h"
#include "state.h"

namespace {

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  return !sim::visible_devices().empty() && sim::real(stream)->capturing
             ? cudaStreamCaptureStatusActive
             : cudaStreamCaptureStatusNone;
}

/// The text of the error says what is not there on a device without arithmetic.
cudaError_t refuse_capture() {
  return sim::fail(sim::settings().arithmetic ? cudaErrorNotSupported
                                              : cudaErrorStreamCaptureUnsupported);
}

}  // namespace

extern "C" {

void sim_cuda_set_capturing(cudaStream_t stream, int capturing) {
  sim::real(stream)->capturing = capturing != 0;
}

void sim_cuda_pass_time(cudaStream_t stream, long us) {
  CUstream_st* on = sim::real(stream);
  on->enqueue([=] { on->ahead = on->ahead.load() + std::chrono::microseconds(us); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned /*flags*/, int priority) {
  SIM_ENTER();
  const int device = sim::current_device();
  *out = new CUstream_st(device, priority);
  const std::lock_guard lock(sim::state().mutex);
  sim::state().devices[device].streams.push_back(*out);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* out) {
  return cudaStreamCreateWithPriority(out, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  SIM_ENTER();
  stream->synchronize();
  const std::lock_guard lock(sim::state().mutex);
  auto& streams = sim::state().devices[stream->device].streams;
  streams.erase(std::find(streams.begin(), streams.end(), stream));
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = sim::real(stream)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  SIM_ENTER();
  return sim::real(stream)->idle() ? cudaSuccess : sim::fail(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  SIM_ENTER();
  sim::real(stream)->synchronize();
  return sim::settled();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  SIM_ENTER();
  sim::real(stream)->enqueue([=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned /*flags*/) {
  SIM_ENTER();
  sim::real(stream)->enqueue([=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t /*stream*/, cudaStreamCaptureMode /*mode*/) {
  SIM_ENTER();
  return refuse_capture();
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t /*stream*/, cudaGraph_t /*graph*/,
                                          const cudaGraphNode_t* /*before*/,
                                          const cudaGraphEdgeData* /*edges*/, size_t /*count*/,
                                          cudaStreamCaptureMode /*mode*/) {
  SIM_ENTER();
  return refuse_capture();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = status_of(stream);
  return sim::enter(__func__);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  *status = status_of(stream);
  const auto clear = [](auto* out) {
    if (out != nullptr) {
      *out = {};
    }
  };
  clear(id);
  clear(graph);
  clear(nodes);
  clear(edges);
  clear(count);
  if (id != nullptr && *status == cudaStreamCaptureStatusActive) {
    *id = 1;
  }
  return sim::enter(__func__);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(*mode, now);
  return cudaSuccess;
}
}
