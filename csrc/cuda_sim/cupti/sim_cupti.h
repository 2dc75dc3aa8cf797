#pragma once
// What CUPTI learns of copies from the runtime.
#include <cstdint>

extern "C" {

struct sim_cupti_copy {
  uint32_t call;           ///< that asked for it
  uint8_t kind, from, to;  ///< of CUPTI's enumerations
  uint64_t bytes;
  uint32_t device, stream;
};

/// A number for a call that copies; 0: no records are asked for.
uint32_t sim_cupti_new_call();
/// Nanoseconds, by the clock of who asks.
uint64_t sim_cupti_now();
/// The call has returned. `function`: of CUpti_runtime_api_trace_cbid.
void sim_cupti_note_call(uint32_t call, uint32_t function, uint64_t start);
/// The stream has done it.
void sim_cupti_note_copy(const sim_cupti_copy* copy, uint64_t start, uint64_t end);
}
