#pragma once
#include <brimful/step/control_record.h>

#include <cstdint>
#include <string>
#include <vector>

/// What ranks may not do differently in a step, found in the records that they exchange in any case: all find the same.
/// `what` is the step's name in texts, "step 3".
namespace brimful {

/// What the ranks of a step must have alike, for ControlRecord::ref: the number that seeds were divided by, and whether
/// the gradient is added to earlier ones.
uint32_t mark_of(double ref, double loss_scale, bool accumulate);

/// @throws PlanMismatch where ranks differ in that
void require_same_mark(const std::vector<ControlRecord>& records, const std::string& what);

/// The text of an error: the weights of all ranks sum to `weight`, which is no number to divide by. `who`: what is known of
/// the batch.
std::string nothing_counts(const std::string& what, double weight, const std::string& who);

}  // namespace brimful
