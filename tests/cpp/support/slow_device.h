#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>

/// A device of torch's PrivateUse1 type in the CPU's memory, which works behind the host's back as CUDA does: each stream
/// is a thread that naps before what it does, in order. Memory that is freed goes to the next allocation of its stream at
/// once, unless another stream was recorded for it.
namespace brimful::test::slow_device {

/// What streams of one of its devices (-1: none) do not do, to see that a test fails.
struct Faults {
  int uses_unknown_to_memory = -1;
  int waits_for_no_event = -1;
};

/// Makes the device known to torch, once, and takes new faults.
void install(const Faults& faults = {});
c10::Device device(int index);
/// Runs `work` on the device's current stream.
void enqueue(c10::Device device, std::function<void()> work);
/// How many there are, for autograd's engine: before it first runs.
void tell_engine(int devices);
/// The next allocations of this thread find no memory.
void refuse_memory(int times);
/// Waits for all streams.
void drain();

}  // namespace brimful::test::slow_device
