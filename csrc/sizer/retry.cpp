#include "sizer/retry.h"

namespace brimful {

Retry::Retry(RetryPolicy& policy, int64_t rows, int64_t max_retries, ExecutionPlan first)
    : policy_(policy), rows_(rows), max_retries_(max_retries), plan_(std::move(first)) {}

ExecutionPlan Retry::next(c10::Device device) const {
  return policy_.next(rows_, plan_, failures_ + 1, max_retries_, device);
}

void Retry::note_tried(int64_t peak_bytes) {
  tried_.push_back({plan_.pieces, plan_.piece_rows, peak_bytes});
}

void Retry::follow(const Ended& ended) {
  ++retries_;
  if (ended.how == Ended::How::ran_out) {
    const auto smaller = ended.next         ? *ended.next
                         : ended.pieces > 0 ? ExecutionPlan::in_pieces(rows_, ended.pieces)
                                            : next(ended.device.value());
    if (ended.device && plan_.rungs.empty()) {
      policy_.note_failure(plan_, *ended.device);
    }
    policy_.set_piece_rows(smaller.piece_rows);
    plan_ = smaller;
  } else if (ended.next) {
    plan_ = *ended.next;
  }
  failures_ += ended.how == Ended::How::for_others ? 0 : 1;
}

}  // namespace brimful
