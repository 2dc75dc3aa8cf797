#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace brimful {

/// Before a step: what its optimizer will take, and gradients that are not there yet, must fit beside what is in use.
/// @throws BatchTooLarge, since no split can help
void require_room_for_optimizer(c10::Device device, int64_t bytes);

}  // namespace brimful
