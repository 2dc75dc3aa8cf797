// What ranks may not do differently in a step, found in the records that they exchange in any case.

#include <algorithm>

#include "base/format.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/loss_scale.h"

namespace brimful {

void BatchSizer::State::require_same_mark(const std::vector<ControlRecord>& records) {
  const auto others = ranks_with_another_ref(records);
  if (others.empty()) {
    return;
  }
  const auto step = "step " + std::to_string(steps_);
  const auto which = " (ranks that differ from rank 0: " + format_list(others) + ")";
  if (std::all_of(others.begin(), others.end(), [&](int rank) {
        return differ_in_accumulate(records[0].ref, records[rank].ref);
      })) {
    throw PlanMismatch("some ranks add the gradients of " + step +
                       " to earlier ones and others do not" + which +
                       "; pass the same accumulate on every rank");
  }
  agreed_.last_total = 0;  // on every rank: the next step works
  throw PlanMismatch("the ranks divided the losses of " + step +
                     " by different numbers, as if they had loaded different states, or had "
                     "scalers with different scales" +
                     which +
                     "; load a state_dict of the same step on every rank, the scaler's too");
}

// Every rank has the same records: all raise, and go on with an exchange.
void BatchSizer::State::require_weight(const std::vector<ControlRecord>& records) const {
  const auto with_data = ranks_with(records, Status::ok);
  TORCH_CHECK_VALUE(
      with_data.empty() || total_weight(records) > 0, "the weights of step ", steps_,
      " sum to 0, and a mean over nothing is no loss (ranks with data: ", format_list(with_data),
      "); leave out batches in which nothing counts, on all ranks together");
}

}  // namespace brimful
