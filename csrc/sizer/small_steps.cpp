#include "sizer/small_steps.h"

#include <cmath>

#include "sizer/step_trace.h"

namespace brimful {
namespace {
constexpr int64_t kSmallestRows = 2;  // BatchNorm refuses one
constexpr int64_t kFirstCheckedRows = 16;
constexpr double kCloseEnough = 0.01;        // of the peak: else twice as many rows are run
constexpr double kMostGuessedOfStep = 0.02;  // of the peak of all rows: likewise
constexpr int64_t kMostRows = int64_t{1} << 40;
}  // namespace

void SmallSteps::trace(int64_t rows, const Step& step) {
  const StepTrace trace(device_);
  step();
  traces_.push_back(trace.traced(rows));
  if (traces_.size() >= 2) {
    model_ = PeakModel::fit(traces_);
  }
}

void SmallSteps::run(int64_t rows, const StepWith& step_with) {
  if (rows <= kSmallestRows + 1 || !StepTrace::is_possible(device_)) {
    return;
  }
  try {
    step_with(kSmallestRows)();  // makes what is made once and for all
    trace(kSmallestRows, step_with(kSmallestRows));
    trace(kSmallestRows + 1, step_with(kSmallestRows + 1));
    for (int64_t few = kFirstCheckedRows; few < rows && model_; few *= 2) {
      const auto forecast = static_cast<double>(model_->peak_bytes(few));
      trace(few, step_with(few));
      const auto peak = static_cast<double>(memory::peak_bytes(traces_.back().trace));
      if (std::abs(forecast - peak) <= kCloseEnough * peak &&
          (!model_ || model_->guessed_share(rows) <= kMostGuessedOfStep)) {
        break;
      }
    }
  } catch (...) {
    traces_.clear();
    model_.reset();
    throw;
  }
}

void SmallSteps::run_whole(int64_t rows, const Step& step) {
  if (traces_.empty()) {
    step();
  } else {
    trace(rows, step);
  }
}

void SmallSteps::look(int64_t rows, const std::vector<at::Tensor>& batch,
                      const std::vector<at::Tensor>& gone) {
  if (!traces_.empty()) {
    room_.emplace(device_, /*margin=*/0, ForecastRoom::Beside::nothing);
    room_->leave_out(gone);
    room_->exchange(batch, rows);
    room_->release_cached();  // segments that these steps left may be in the way
  }
}

std::optional<int64_t> SmallSteps::peak_bytes(int64_t rows) const {
  return model_ && room_
             ? std::optional(room_->used_bytes() + room_->need(*model_, rows).peak_bytes)
             : std::nullopt;
}

int64_t SmallSteps::margin_bytes(int64_t rows) const {
  return model_ && room_ ? room_->margin_bytes(*model_, rows) : 0;
}

bool SmallSteps::workspaces_unknown() const {
  return model_ && room_ && room_->workspaces_unknown();
}

std::optional<int64_t> SmallSteps::limit_bytes() const {
  return model_ && room_ ? room_->capacity_bytes() : std::nullopt;
}

std::optional<int64_t> SmallSteps::largest_rows() const {
  return limit_bytes() ? std::optional(room_->largest_rows(*model_, kMostRows)) : std::nullopt;
}

}  // namespace brimful
