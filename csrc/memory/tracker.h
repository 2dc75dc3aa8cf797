#pragma once
#include <brimful/memory/live_table.h>
#include <c10/core/Device.h>
#include <vector>
#include "memory/block_table.h"

/// What allocators report to the live table.
namespace brimful::memory {

BlockTable& cpu_blocks();
/// The device with its index, and ready to be asked.
/// @throws c10::ValueError for a device whose memory is not counted
c10::Device checked(c10::Device device);
/// Of such a device.
BlockTable& blocks_of(c10::Device device);

/// Of each device that is tracked, the CPU's first.
BRIMFUL_API std::vector<LiveBlock> live_blocks_everywhere();
/// Those that have a table now, or had one when tracking was stopped.
std::vector<c10::Device> tracked_devices();
/// In use of such a device, as its table counts it. Needs the table's lock.
int64_t followed_bytes(c10::Device device);

/// Where CUDA came into use after the start of tracking; a glance where it did not. Each allocation on the CPU calls it, and
/// in Python the start of CUDA does.
BRIMFUL_API void follow_cuda();

/// The peak's parts begin anew at what is in use now.
void reset_tracked_peak(c10::Device device);

/// As mark_step, unless mark_step was called since the start.
BRIMFUL_API void mark_step_unless_by_hand();

}  // namespace brimful::memory
