#include "step/retry_policy.h"
#include <brimful/memory/stats.h>
#include <brimful/step/pieces.h>

#include <algorithm>

namespace brimful {
namespace {
constexpr int64_t kUnitsBetweenReleases = 16;
}  // namespace

ExecutionPlan ExecutionPlan::in_pieces(int64_t rows, int64_t pieces) {
  return {pieces, pieces_for(rows, pieces)};
}

RetryPolicy::RetryPolicy(const std::vector<c10::Device>& devices, int64_t piece_rows,
                         PieceHistory::Law law)
    : piece_rows_(piece_rows) {
  for (const auto device : devices) {
    seen_.push_back({device, 0, PieceHistory(law)});
  }
}

const RetryPolicy::Seen* RetryPolicy::find(c10::Device device) const {
  const auto found = std::find_if(seen_.begin(), seen_.end(),
                                  [&](const auto& seen) { return seen.device == device; });
  return found == seen_.end() ? nullptr : &*found;
}

void RetryPolicy::measure() {
  for (auto& seen : seen_) {
    seen.used_before = memory::stats(seen.device).used_bytes;
  }
}

PieceHistory::Room RetryPolicy::room(c10::Device device) const {
  const auto* seen = find(device);
  const auto capacity = seen != nullptr ? memory::capacity_bytes(device) : std::nullopt;
  return capacity ? PieceHistory::Room(*capacity - seen->used_before) : std::nullopt;
}

bool RetryPolicy::may_release() const {
  return !released_in_ || units_ - *released_in_ >= kUnitsBetweenReleases;
}

int64_t RetryPolicy::known_pieces(int64_t rows, int64_t pieces) const {
  return piece_rows_ > 0 ? pieces_for(rows, piece_rows_) : pieces;
}

ExecutionPlan RetryPolicy::first(int64_t rows, int64_t pieces) const {
  const auto known = known_pieces(rows, pieces);
  if (piece_rows_ == 0 || seen_.empty()) {
    return ExecutionPlan::in_pieces(rows, known);
  }
  int64_t most = 1;
  for (const auto& seen : seen_) {
    most = std::max(most, seen.history.fitting(rows, known, room(seen.device), units_));
  }
  return ExecutionPlan::in_pieces(rows, most);
}

ExecutionPlan RetryPolicy::next(int64_t rows, const ExecutionPlan& failed, int64_t failures,
                                int64_t max_retries, c10::Device device) const {
  const bool even = pieces_for(rows, failed.pieces) == failed.piece_rows;
  const auto pieces = even ? failed.pieces : pieces_for(rows, failed.piece_rows);
  auto more = finer_within(rows, pieces, failures, max_retries);
  if (const auto* seen = find(device)) {
    more = std::max(more, seen->history.finer(rows, pieces, room(device)));
  }
  return ExecutionPlan::in_pieces(rows, more);
}

void RetryPolicy::note_failure(const ExecutionPlan& failed, c10::Device device) {
  for (auto& seen : seen_) {
    if (seen.device == device) {
      seen.history.note_failure(failed.piece_rows, failed.pieces, room(device), units_);
    }
  }
}

void RetryPolicy::note_fit(const ExecutionPlan& plan, const Bytes& peaks, bool raises) {
  for (const auto& [device, bytes] : peaks) {
    for (auto& seen : seen_) {
      if (seen.device == device) {
        seen.history.note(plan.piece_rows, plan.pieces, bytes - seen.used_before, room(device));
      }
    }
  }
  if (piece_rows_ > 0 && raises) {
    piece_rows_ = std::max(piece_rows_, plan.piece_rows);
  }
}

}  // namespace brimful
