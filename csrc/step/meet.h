#pragma once
#include <brimful/step/step.h>

#include <vector>

/// Collectives of a step's prologue. A group without participants answers by itself.
namespace brimful {

/// Every rank's record.
std::vector<ControlRecord> meet_ranks(const StepGroup& group, const ControlRecord& record);
/// Every rank's tensor, as Participant::gather.
std::vector<at::Tensor> gather_over_ranks(const StepGroup& group, const at::Tensor& own);
/// As Participant::sum.
void sum_over_ranks(const StepGroup& group, at::Tensor& tensor);
/// Of all participants, and those outside of them.
std::vector<at::Tensor> parameters_of(const StepGroup& group);

}  // namespace brimful
