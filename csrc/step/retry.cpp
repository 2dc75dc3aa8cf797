#include "step/retry.h"

#include <brimful/memory/stats.h>

#include "memory/is_counted.h"
#include "step/remedy.h"

namespace brimful {

Retry::Retry(RetryPolicy& policy, int64_t rows, int64_t max_retries, ExecutionPlan first,
             StepRecorder* recorder)
    : policy_(policy),
      rows_(rows),
      max_retries_(max_retries),
      plan_(std::move(first)),
      recorder_(recorder) {}

void Retry::begin_attempt() {
  if (recorder_ != nullptr) {
    recorder_->begin_attempt();
  }
}

bool Retry::end_attempt(const Ended& ended) {
  if (ended.how != Ended::How::stands) {
    follow(ended);
    return false;
  }
  policy_.end_unit();
  return true;
}

ExecutionPlan Retry::next(c10::Device device) const {
  return policy_.next(rows_, plan_, failures_ + 1, max_retries_, device);
}

bool Retry::may_do_as_it_was(const std::string& shortage, c10::Device device) {
  if (!memory::is_counted(device)) {
    return false;
  }
  if (release_helps(shortage, device)) {
    releases_ = device;
    if (policy_.may_release()) {
      return true;
    }
  }
  return garbage_.helps(device);
}

AttemptNote& Retry::note(AttemptNote attempt, bool ran_out) {
  if (recorder_ != nullptr) {
    recorder_->end_attempt(attempt.pieces, attempt.piece_rows, attempt.peak_bytes, ran_out);
  }
  attempts_.push_back(std::move(attempt));
  return attempts_.back();
}

void Retry::remedy() {
  auto& last = attempts_.back();
  last.garbage_bytes = garbage_.take_freed_bytes();
  if (const auto device = std::exchange(releases_, std::nullopt)) {
    memory::release_cached(*device);
    last.cache_released = true;
    policy_.note_release();
  }
  if (recorder_ != nullptr) {
    recorder_->note_retry(last.cache_released, last.garbage_bytes > 0);
  }
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
  } else if (ended.pieces > 0) {
    plan_ = ExecutionPlan::in_pieces(rows_, ended.pieces);
  }
  failures_ += ended.how == Ended::How::for_others ? 0 : 1;
}

}  // namespace brimful
