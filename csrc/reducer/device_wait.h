#pragma once
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <optional>

#include "reducer/agree.h"

namespace brimful {

/// Whether the backend's wait() makes the current stream wait, and not the host.
bool waits_in_streams(c10d::ProcessGroup& group, c10::Device device);

/// When to give up what is under way: from the backend's timeout on torch's watchdog may end the process. None: it does not
/// say its timeout.
std::optional<std::chrono::milliseconds> patience_of(c10d::Backend& backend);

/// @throws std::runtime_error if the backend has found an error
void require_no_error(c10d::Backend& backend);

/// Before a collective of a device is called: torch's watchdog, once it has found an error, holds for up to a minute a lock
/// that the call needs. Nothing on the CPU.
/// @throws std::runtime_error if the group's backend has found an error
void require_no_error(const Group& group, c10::Device device);

/// Waits on the host until a collective of a device has ended, then makes the current stream wait for it. Looks at the
/// device, at what its backend has found, and twice a second at what `listen` throws. What is aborted meanwhile has ended
/// for the device, with any values: that throws.
/// @throws what the collective or its backend reports, or if it has not ended shortly before the group's timeout, counted
/// from `since`: from then on torch's watchdog may end the process
void wait_on_device(const Group& group, c10::Device device, c10d::Work& work,
                    std::chrono::steady_clock::time_point since,
                    const std::function<void()>& listen);

}  // namespace brimful
