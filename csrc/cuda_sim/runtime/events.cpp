// The runtime's functions of events.
#include <algorithm>
#include <chrono>

#include "state.h"

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  SIM_ENTER();
  *out = new CUevent_st(flags);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* out) {
  return cudaEventCreateWithFlags(out, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  SIM_ENTER();
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned /*flags*/) {
  SIM_ENTER();
  CUstream_st* on = sim::real(stream);
  on->enqueue([on, mark = event->renew(on)] { mark->set(on->ahead); });
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  SIM_ENTER();
  const auto mark = event->latest();
  CUstream_st* on = sim::real(stream);
  const auto follow = [on, mark] {
    mark->wait();
    on->ahead = std::max(on->ahead.load(), mark->ahead());
  };
  if (mark && !mark->is_done()) {
    on->enqueue(follow, sim::When::by_thread);
  } else if (mark && mark->ahead() > sim::Clock::duration::zero()) {
    on->enqueue(follow);
  }
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  SIM_ENTER();
  const auto mark = event->latest();
  return !mark || mark->is_done() ? cudaSuccess : sim::fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  SIM_ENTER();
  if (const auto mark = event->latest()) {
    mark->wait();
  }
  return sim::settled();
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  SIM_ENTER();
  const auto from = start->latest();
  const auto to = end->latest();
  if (!from || !to || ((start->flags | end->flags) & cudaEventDisableTiming) != 0) {
    return sim::fail(cudaErrorInvalidResourceHandle);
  }
  if (!from->is_done() || !to->is_done()) {
    return sim::fail(cudaErrorNotReady);
  }
  *ms = std::chrono::duration<float, std::milli>(to->time() - from->time()).count();
  return cudaSuccess;
}
}
