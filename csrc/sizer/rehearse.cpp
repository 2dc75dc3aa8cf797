#include "sizer/rehearse.h"

#include <brimful/memory/trace.h>

#include <algorithm>
#include <cmath>

#include "base/thrown_by.h"
#include "sizer/loss_scale.h"
#include "sizer/step_trace.h"
#include "step/pieces_run.h"

namespace brimful {
namespace {
constexpr int64_t kCheckedRows = 16;
constexpr double kGoodEnough = 0.01;   // of the peak: else a larger size is traced
constexpr double kMostGuessed = 0.02;  // of the peak of a piece that fits: likewise
}  // namespace

Rehearser::Rehearser(StepGroup& group, KeptBatch& batch, const PieceWork& work,
                     const BatchSizerOptions& options, double margin)
    : group_(group),
      batch_(batch),
      work_(work),
      options_(options),
      margin_(margin),
      as_in_step_{work.forward, scaled_backward(work.backward, options.scaler)} {}

void Rehearser::run(int64_t rows) {
  trace(kFirstRows);  // what is allocated once and for all
  traced_ = {};
  trace(kFirstRows);
  trace(kFirstRows + 1);
  int64_t checked = model_ ? checked_rows() : 0;
  // A library's workspaces may jump at any size on CUDA: of fewer rows the batch itself is run.
  if (options_.device.is_cuda()) {
    checked = std::min(checked, rows);
  }
  while (model_ && checked > kFirstRows + 1 && checked <= rows) {
    const auto forecast = static_cast<double>(model_->peak_bytes(checked));
    if (!trace(checked) || is_good(forecast, rows)) {
      break;
    }
    checked *= 2;
  }
}

void Rehearser::note_shortage() {
  traced_.fits = traced_.second.empty() ? 1 : traced_.second.back().rows;
}

int64_t Rehearser::checked_rows() const {
  const auto now = room();
  return now.fits(*model_, kCheckedRows) ? kCheckedRows
                                         : now.largest_rows(*model_, kCheckedRows) * 4 / 5;
}

bool Rehearser::is_good(double forecast, int64_t rows) const {
  const auto peak = static_cast<double>(memory::peak_bytes(traced_.second.back().trace));
  return std::abs(forecast - peak) <= kGoodEnough * peak &&
         (!model_ || model_->guessed_share(room().largest_rows(*model_, rows)) <= kMostGuessed);
}

bool Rehearser::trace(int64_t rows) {
  KeptBatch few;  // copied before anything is traced
  if (work_.tensors) {
    few.begin(work_.tensors(0, rows), KeptBatch::Copies::all);
  }
  if (model_ && !room().fits(*model_, rows)) {
    return false;
  }
  const auto error = thrown_by([&] { trace_few(rows, few); });
  few.restore();
  batch_.learn(few);
  if (error) {
    std::rethrow_exception(error);
  }
  if (traced_.second.size() >= 2) {
    model_ = PeakModel::fit(traced_.second);
  }
  return true;
}

void Rehearser::trace_few(int64_t rows, KeptBatch& few) {
  const StepTrace trace(options_.device);
  size_t of_first = 0;
  rehearse(group_, rows, as_in_step_, [&] {
    of_first = trace.size();
    few.restore();
  });
  traced_.first.push_back(trace.traced(rows, of_first));
  traced_.second.push_back(trace.traced(rows));
}

}  // namespace brimful
