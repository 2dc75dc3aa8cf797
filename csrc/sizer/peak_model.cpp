#include "sizer/peak_model.h"
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "sizer/align_traces.h"

namespace brimful {
namespace {
// Of an allocation's size: alignment to a cache line or so is no other law of growth.
constexpr double kPeakToleranceBytes = 64;
constexpr double kTolerance = 0.001;
constexpr double kPartPagesBytes = 2 * 4096;  // parts are rounded by themselves
constexpr double kPeakTolerance = 0.005;      // where the sequence is another one

bool is_same_sequence(const memory::Trace& one, const memory::Trace& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](int64_t a, int64_t b) { return (a < 0) == (b < 0); });
}
}  // namespace

std::optional<PeakModel> PeakModel::fit(std::vector<TracedRows> traces) {
  std::sort(traces.begin(), traces.end(),
            [](const auto& a, const auto& b) { return a.rows < b.rows; });
  TORCH_CHECK_VALUE(traces.size() >= 2,
                    "a model needs traces of two sizes (traces: ", traces.size(), ")");
  TORCH_CHECK_VALUE(traces.front().rows > 0, "a traced piece has rows (rows: ", traces.front().rows,
                    ")");
  for (size_t i = 1; i < traces.size(); ++i) {
    TORCH_CHECK_VALUE(traces[i].rows > traces[i - 1].rows,
                      "traces must be of different sizes (rows: ", traces[i].rows, ", twice)");
  }
  const auto other = std::find_if(traces.begin() + 1, traces.end(), [&](const auto& traced) {
    return !is_same_sequence(traces.front().trace, traced.trace);
  });
  if (other == traces.end()) {
    return PeakModel(traces);
  }
  auto collapsed = traces;
  for (auto& traced : collapsed) {
    collapse_rounds(traced.trace);
  }
  if (std::all_of(collapsed.begin() + 1, collapsed.end(), [&](const auto& traced) {
        return is_same_sequence(collapsed.front().trace, traced.trace);
      })) {
    return PeakModel(collapsed);
  }
  if (other - traces.begin() >= 2) {  // a library takes another way there: it may not matter
    PeakModel model({traces.begin(), other});
    const bool agrees = std::all_of(other, traces.end(), [&](const auto& traced) {
      const auto peak = static_cast<double>(memory::peak_bytes(traced.trace));
      return std::abs(static_cast<double>(model.peak_bytes(traced.rows)) - peak) <=
             kPeakTolerance * peak;
    });
    if (agrees) {
      return model;
    }
  }
  for (auto* const aligned : {&traces, &collapsed}) {
    if (align(*aligned)) {
      return PeakModel(*aligned);
    }
  }
  return std::nullopt;
}

PeakModel::PeakModel(const std::vector<TracedRows>& traces) {
  for (const auto& traced : traces) {
    rows_.push_back(static_cast<double>(traced.rows));
  }
  const auto events = traces.front().trace.size();
  events_.reserve(events);
  double total = 0;
  double off_line = 0;
  std::vector<double> bytes(traces.size());
  for (size_t event = 0; event < events; ++event) {
    std::transform(traces.begin(), traces.end(), bytes.begin(),
                   [&](const auto& traced) { return static_cast<double>(traced.trace[event]); });
    events_.push_back(event_of(bytes));
    const auto at_largest = std::abs(bytes.back());
    total += at_largest;
    off_line += events_.back().traced.empty() ? 0 : at_largest;
  }
  off_line_ = total > 0 ? off_line / total : 0;
  if (traces.back().blocks.size() == events) {
    blocks_ = traces.back().blocks;
  }
}

PeakModel::Event PeakModel::event_of(const std::vector<double>& bytes) const {
  const double most = rows_.back();
  const double of_row = (bytes[1] - bytes[0]) / (rows_[1] - rows_[0]);
  Event event{bytes[0] - of_row * rows_[0], of_row, {}};
  const double off = std::abs(event.constant + of_row * most - bytes.back());
  const bool is_everywhere = std::find(bytes.begin(), bytes.end(), 0) == bytes.end();
  if (is_everywhere && off <= std::max(kPeakToleranceBytes, kTolerance * std::abs(bytes.back()))) {
    return event;
  }
  event.traced = bytes;
  event.per_row = bytes.back() / most;
  const double before = bytes[bytes.size() - 2];
  if (!is_everywhere && before != 0) {  // two sizes of the largest have it: they show how it grows
    const double slope = (bytes.back() - before) / (most - rows_[rows_.size() - 2]);
    event.per_row = bytes.back() < 0 ? std::clamp(slope, event.per_row, 0.)
                                     : std::clamp(slope, 0., event.per_row);
  }
  const double grown = (bytes.back() - bytes.front()) / (most - rows_.front());
  event.least_per_row = bytes.back() < 0 ? std::clamp(grown, event.per_row, 0.)
                                         : std::clamp(grown, 0., event.per_row);
  return event;
}

double PeakModel::bytes_of(const Event& event, double rows) const {
  if (event.traced.empty()) {
    return event.constant + event.per_row * rows;
  }
  const bool on_cuda = !blocks_.empty();
  const double pages = on_cuda ? 0 : kPartPagesBytes;
  const auto padded = [&](double bytes) {
    return bytes < 0 ? bytes - pages : bytes > 0 ? bytes + pages : 0;
  };
  if (rows >= rows_.back()) {
    return padded(event.traced.back() + event.per_row * (rows - rows_.back()));
  }
  if (on_cuda) {  // a workspace, which may be as large just behind the smaller size
    return event.traced[std::lower_bound(rows_.begin(), rows_.end(), rows) - rows_.begin()];
  }
  const auto behind = std::upper_bound(rows_.begin() + 1, rows_.end() - 1, rows) - rows_.begin();
  const double share = (rows - rows_[behind - 1]) / (rows_[behind] - rows_[behind - 1]);
  return padded(event.traced[behind - 1] +
                share * (event.traced[behind] - event.traced[behind - 1]));
}

memory::Trace PeakModel::trace_at(int64_t rows) const {
  constexpr double kHalf = 0.5;
  memory::Trace trace;
  trace.reserve(events_.size());
  for (const auto& event : events_) {
    const double bytes = bytes_of(event, static_cast<double>(rows));
    trace.push_back(static_cast<int64_t>(bytes < 0 ? bytes - kHalf : bytes + kHalf));
  }
  return trace;
}

int64_t PeakModel::peak_bytes(int64_t rows) const {
  double used = 0;
  double peak = 0;
  for (const auto& event : events_) {
    used += bytes_of(event, static_cast<double>(rows));
    peak = std::max(peak, used);
  }
  return static_cast<int64_t>(std::ceil(peak));
}

double PeakModel::guessed_share(int64_t rows) const {
  const double behind = std::max(0., static_cast<double>(rows) - rows_.back());
  double used = 0;
  double least_used = 0;
  double peak = 0;
  double least = 0;
  for (const auto& event : events_) {
    const double bytes = bytes_of(event, static_cast<double>(rows));
    used += bytes;
    least_used +=
        bytes - (event.traced.empty() ? 0 : behind * (event.per_row - event.least_per_row));
    peak = std::max(peak, used);
    least = std::max(least, least_used);
  }
  return peak > 0 ? (peak - least) / peak : 0;
}

int64_t PeakModel::largest_rows(int64_t bytes, int64_t at_most) const {
  int64_t fits = 0;
  int64_t too_many = at_most + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (peak_bytes(middle) <= bytes ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace brimful
