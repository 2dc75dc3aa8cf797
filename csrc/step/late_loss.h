#pragma once
#include <brimful/step/late_losses.h>

#include <memory>

namespace brimful {

/// Of a rank that is alone: a 0-dim double of a device.
std::shared_ptr<LateLosses> late_loss_of(const at::Tensor& loss_sum);

}  // namespace brimful
