// What ranks may not do differently in a step, found in the records that they exchange in any case.
#include <brimful/sizer/batch_sizer.h>

#include <algorithm>

#include "sizer/loss_scale.h"

namespace brimful {
namespace {
std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}
}  // namespace

void BatchSizer::require_same_mark(const std::vector<ControlRecord>& records) {
  const auto others = ranks_with_another_ref(records);
  if (others.empty()) {
    return;
  }
  const auto step = "step " + std::to_string(steps_);
  const auto which = " (ranks that differ from rank 0: " + join(others) + ")";
  if (std::all_of(others.begin(), others.end(), [&](int rank) {
        return differ_in_accumulate(records[0].ref, records[rank].ref);
      })) {
    throw PlanMismatch("some ranks add the gradients of " + step +
                       " to earlier ones and others do not" + which +
                       "; pass the same accumulate on every rank");
  }
  last_total_ = 0;  // on every rank: the next step works
  throw PlanMismatch("the ranks divided the losses of " + step +
                     " by different numbers, as if they had loaded different states, or had "
                     "scalers with different scales" +
                     which +
                     "; load a state_dict of the same step on every rank, the scaler's too");
}

}  // namespace brimful
