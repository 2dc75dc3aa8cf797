#pragma once
#include <brimful/step/late_sums.h>
#include <brimful/step/participant.h>

#include <memory>

namespace brimful {

/// Of a rank that is alone, whose `loss_sum` a device has. Does not wait.
std::shared_ptr<const LateSums> sums_of(const Announcement& said);

}  // namespace brimful
