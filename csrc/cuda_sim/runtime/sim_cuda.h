#pragma once
// What a test may plant in the simulated devices and ask of them, and what the other fakes share with the runtime.
// From Python: ctypes.CDLL("libcudart.so.13").sim_cuda_calls(b"cudaMalloc").
#include <driver_types.h>

#include <cstddef>

extern "C" {

/// From now on every call for this device fails with this error, as after an illegal memory access; 0 ends it.
void sim_cuda_plant_error(int device, int error);
/// Calls of this function of the runtime fail with this error: after `after` more calls, `times` times.
void sim_cuda_plant_fault(const char* function, int error, long after, long times);
/// How often this function of the runtime was called. "operator": how often an operator took the place of kernels.
long sim_cuda_calls(const char* function);
void sim_cuda_note_operator();
/// Whether this stream says that it is being captured into a graph: for code that asks. Nothing is captured.
void sim_cuda_set_capturing(cudaStream_t stream, int capturing);
/// Memory of this device that another process is to have.
void sim_cuda_set_others(int device, size_t bytes);
/// From now on streams start their work this much later, as SIM_CUDA_DELAY_US says; -1: inside the call.
void sim_cuda_set_delay(long us);
/// From now on this stream starts nothing, until it is released or waited for: the host, or a stream that
/// waits for one of its events. So a wait that is missing is seen, whatever the machine does meanwhile.
void sim_cuda_hold(cudaStream_t stream);
void sim_cuda_release(cudaStream_t stream);
/// Work of this stream that takes so long by its clock, and no time: events behind it, and of streams that then wait for
/// it, are that much later (not those of other processes).
void sim_cuda_pass_time(cudaStream_t stream, long us);

/// From now on a kernel that has no stand-in ends the process, as SIM_CUDA_STRICT=1 says, or does not.
void sim_cuda_set_strict(int strict);
/// How many kernels without a stand-in were not run.
long sim_cuda_kernels_not_run();

/// Whether this process has used this device, and so has a primary context on it.
int sim_cuda_active(int device);
/// Whether what is asked of this stream now is done behind the host's back: with a delay, held, or after other work.
int sim_cuda_defers(cudaStream_t stream);
/// Runs `work` in a thread of the stream, whatever SIM_CUDA_DELAY_US is: for work that may wait for another process.
void sim_cuda_enqueue(cudaStream_t stream, void (*work)(void*), void* data);

/// Whether devices compute: SIM_CUDA_ARITHMETIC.
int sim_cuda_has_arithmetic();
/// Copies what is known of memory of a device, from its first byte on, to the host, unless `to` is null. Returns how
/// many bytes that are: all, on a device with arithmetic.
size_t sim_cuda_read(void* to, const void* from, size_t bytes);
/// Copies the first bytes, which are known, from the host to memory of a device: the others are not known from now on.
void sim_cuda_write(void* to, const void* from, size_t known, size_t bytes);
/// Work of a stream will write there: until it says that it has, the host waits before it asks or says what is known
/// there. Returns a number for that.
long sim_cuda_will_write(const void* begin, size_t bytes);
void sim_cuda_has_written(long number);

// Devices without arithmetic. Which of their bytes are known, and what a read of others gets.

/// Makes bytes known, that the caller writes then; 0 if they are no memory of such a device, or too many.
int sim_cuda_keep(void* begin, size_t bytes);
void sim_cuda_forget(const void* begin, size_t bytes);
int sim_cuda_is_known(const void* begin, size_t bytes);
/// Of one tensor at most: SIM_CUDA_KNOWN_MB.
size_t sim_cuda_known_bytes();
/// What stands for a figure that is not known, by SIM_CUDA_UNKNOWN: 1 the least that can be, 2 the most, 0 if it is unset.
int sim_cuda_unknown();
enum { kLeast = 1, kMost = 2 };
/// Is asked, without a lock, when bytes that are not known are read: it writes them, or returns 0, and they are zeros.
void sim_cuda_answer_unknown(int (*answer)(void* to, const void* from, size_t bytes));

/// How many devices the machine has, whatever CUDA_VISIBLE_DEVICES leaves of them.
int sim_cuda_machine_devices();
/// The most that this process had of a device of the machine at once.
size_t sim_cuda_peak_bytes(int device);
/// Bytes of a device of the machine, what this process has of it and what the other process has of it.
void sim_cuda_machine_memory(int device, size_t* total, size_t* own, size_t* others);
}
