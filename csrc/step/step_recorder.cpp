#include "step/step_recorder.h"

#include <algorithm>

namespace brimful {
namespace {
double ms_between(StepRecorder::Clock::time_point begin, StepRecorder::Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}
}  // namespace

void StepRecorder::begin_attempt(Clock::time_point now) {
  if (!running_) {
    running_ = true;
    step_began_ = now;
    open_ = {};
  }
  attempt_began_ = now;
}

void StepRecorder::end_attempt(int64_t pieces, int64_t piece_rows, int64_t peak_bytes,
                               bool out_of_memory) {
  open_.pieces = pieces;
  open_.piece_rows = piece_rows;
  open_.peak_bytes = std::max(open_.peak_bytes, peak_bytes);
  open_.ooms += out_of_memory ? 1 : 0;
}

void StepRecorder::note_retry(bool cache_released, bool garbage_collected) {
  ++open_.retries;
  sums_.cache_releases += cache_released ? 1 : 0;
  sums_.garbage_collections += garbage_collected ? 1 : 0;
}

void StepRecorder::end_step(bool stood, std::optional<int64_t> limit_bytes, Clock::time_point now) {
  if (!running_) {
    return;
  }
  running_ = false;
  StepNote note = open_;
  note.stood = stood;
  note.limit_bytes = limit_bytes;
  note.total_ms = ms_between(step_began_, now);
  note.lost_ms = note.stood ? ms_between(step_began_, attempt_began_) : note.total_ms;
  (note.stood ? sums_.steps : sums_.failed) += 1;
  sums_.retries += note.retries;
  sums_.ooms += note.ooms;
  sums_.total_ms += note.total_ms;
  sums_.lost_ms += note.lost_ms;
  sums_.limit_bytes = note.limit_bytes;
  sums_.peak_bytes = note.peak_bytes;
  sums_.last_fill.reset();
  if (note.limit_bytes && *note.limit_bytes > 0) {
    const double fill =
        static_cast<double>(note.peak_bytes) / static_cast<double>(*note.limit_bytes);
    sums_.last_fill = fill;
    sums_.most_fill = std::max(sums_.most_fill.value_or(fill), fill);
    fill_sum_ += fill;
    ++filled_;
  }
  ring_[noted_ % ring_.size()] = note;
  ++noted_;
}

double StepRecorder::attempt_ms(Clock::time_point now) const {
  return ms_between(attempt_began_, now);
}

Report StepRecorder::report(int64_t piece_rows) const {
  Report report = sums_;
  report.piece_rows = piece_rows;
  if (filled_ > 0) {
    report.mean_fill = fill_sum_ / static_cast<double>(filled_);
  }
  for (size_t i = noted_ - std::min(noted_, ring_.size()); i < noted_; ++i) {
    report.history.push_back(ring_[i % ring_.size()]);
  }
  return report;
}

}  // namespace brimful
