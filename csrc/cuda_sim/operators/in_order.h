#pragma once
#include <c10/core/Device.h>

#include <functional>

namespace sim_operators {

/// Whether the device's current stream works behind the host's back.
bool defers(c10::Device device);

/// The stream does it when it comes to it.
void enqueue(c10::Device device, std::function<void()> work);

/// Waits for it too, and raises what it raises. Other threads may use the same stream: what they have queued comes first.
void call_in_order(c10::Device device, const std::function<void()>& work);

}  // namespace sim_operators
