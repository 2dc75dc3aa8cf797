#include "step/agreement.h"

#include <algorithm>

#include "base/format.h"
#include "base/text_stream.h"

namespace brimful {
namespace {
constexpr uint32_t kAccumulates = 1;

bool differ_in_accumulate(uint32_t mark, uint32_t other) {
  return (mark ^ other) == kAccumulates;
}
}  // namespace

uint32_t mark_of(double ref, double loss_scale, bool accumulate) {
  return fingerprint(ref / loss_scale) ^ (accumulate ? kAccumulates : 0);
}

void require_same_mark(const std::vector<ControlRecord>& records, const std::string& what) {
  const auto others = ranks_with_another_ref(records);
  if (others.empty()) {
    return;
  }
  const auto which = " (ranks that differ from rank 0: " + format_list(others) + ")";
  if (std::all_of(others.begin(), others.end(), [&](int rank) {
        return differ_in_accumulate(records[0].ref, records[rank].ref);
      })) {
    throw PlanMismatch("some ranks add the gradients of " + what +
                       " to earlier ones and others do not" + which +
                       "; pass the same accumulate on every rank");
  }
  throw PlanMismatch("the ranks divided the losses of " + what +
                     " by different numbers, as if they had loaded different states, or had "
                     "scalers with different scales" +
                     which +
                     "; load a state_dict of the same step on every rank, the scaler's too");
}

std::string nothing_counts(const std::string& what, double weight, const std::string& who) {
  TextStream text;
  text << "the weights of " << what << " sum to " << weight
       << ", and a mean over nothing is no loss (" << who
       << "); leave out batches in which nothing counts, on all ranks together";
  return text.str();
}

}  // namespace brimful
