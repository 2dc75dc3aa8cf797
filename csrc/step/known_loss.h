#pragma once
#include <ATen/ATen.h>
#include <brimful/step/participant.h>

#include <utility>

namespace brimful {

/// The same with its loss in the record. Waits for the device that has it: in launch_last, since what fails there is sent to the
/// other ranks.
inline Announcement with_known_loss(Announcement said) {
  if (said.loss_sum.defined()) {
    said.record.loss_sum = said.loss_sum.item<double>();
    said.loss_sum.reset();
  }
  return said;
}

}  // namespace brimful
