// CUPTI for torch.profiler, with what activity.cpp records: the real one would look for more of a driver than driver/ has.
#include <cupti.h>

extern "C" {

CUptiResult cuptiGetResultString(CUptiResult /*result*/, const char** text) {
  *text = "an error of the simulated CUPTI";
  return CUPTI_SUCCESS;
}

CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}

CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain /*domain*/, uint32_t function,
                                 const char** name) {
  *name = function == CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020 ? "cudaMemcpyAsync_v3020"
                                                                     : "another function";
  return CUPTI_SUCCESS;
}

// Nothing is called back.
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc /*callback*/,
                           void* data) {
  *subscriber = static_cast<CUpti_SubscriberHandle>(data);
  return CUPTI_SUCCESS;
}

CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle /*subscriber*/) {
  return CUPTI_SUCCESS;
}

CUptiResult cuptiEnableCallback(uint32_t /*on*/, CUpti_SubscriberHandle /*subscriber*/,
                                CUpti_CallbackDomain /*domain*/, CUpti_CallbackId /*function*/) {
  return CUPTI_SUCCESS;
}

CUptiResult cuptiEnableDomain(uint32_t /*on*/, CUpti_SubscriberHandle /*subscriber*/,
                              CUpti_CallbackDomain /*domain*/) {
  return CUPTI_SUCCESS;
}

CUptiResult cuptiFinalize() {
  return CUPTI_SUCCESS;
}

// What would be called of the driver and the runtime beside copies, and settings of the recording: taken, and of no effect.
CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute /*attribute*/, size_t* /*bytes*/,
                                      void* /*value*/) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId /*function*/, uint8_t /*on*/) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId /*function*/, uint8_t /*on*/) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t /*on*/) {
  return CUPTI_SUCCESS;
}
}
