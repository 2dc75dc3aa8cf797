#include <brimful/sizer/peak_model.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace brimful {
namespace {
// Of an allocation's size: alignment to a cache line or so is no other law of growth.
constexpr double kToleranceBytes = 64;
constexpr double kTolerance = 0.001;
constexpr double kPagesBytes = 2 * 4096;  // parts are rounded by themselves
constexpr double kPeakTolerance = 0.005;  // where the sequence is another one

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
  if (!is_same_sequence(traces[0].trace, traces[1].trace)) {
    return std::nullopt;
  }
  const auto& first = traces[0];
  const auto& second = traces[1];
  const auto other = std::find_if(traces.begin() + 2, traces.end(), [&](const auto& traced) {
    return !is_same_sequence(first.trace, traced.trace);
  });
  if (other !=
      traces.end()) {  // a library takes another way there: the model stands if it says the same
    const TracedRows check = *other;
    traces.erase(other, traces.end());
    auto model = fit(std::move(traces));
    const auto peak = static_cast<double>(memory::peak_bytes(check.trace));
    const bool agrees = model && std::abs(static_cast<double>(model->peak_bytes(check.rows)) -
                                          peak) <= kPeakTolerance * peak;
    return agrees ? model : std::nullopt;
  }
  const auto& largest = traces.back();
  const auto most = static_cast<double>(largest.rows);
  PeakModel model;
  for (const auto& traced : traces) {
    model.rows_.push_back(static_cast<double>(traced.rows));
  }
  model.events_.reserve(first.trace.size());
  double total = 0;
  double off_line = 0;
  for (size_t i = 0; i < first.trace.size(); ++i) {
    const auto at_first = static_cast<double>(first.trace[i]);
    const auto at_largest = static_cast<double>(largest.trace[i]);
    const double per_row = (static_cast<double>(second.trace[i]) - at_first) /
                           static_cast<double>(second.rows - first.rows);
    Event event{at_first - per_row * static_cast<double>(first.rows), per_row, {}};
    const double off = std::abs(event.constant + event.per_row * most - at_largest);
    if (off > std::max(kToleranceBytes, kTolerance * std::abs(at_largest))) {
      for (const auto& traced : traces) {
        event.traced.push_back(static_cast<double>(traced.trace[i]));
      }
      off_line += std::abs(at_largest);
    }
    total += std::abs(at_largest);
    model.events_.push_back(std::move(event));
  }
  model.off_line_ = total > 0 ? off_line / total : 0;
  return model;
}

double PeakModel::bytes_of(const Event& event, double rows) const {
  if (event.traced.empty()) {
    return event.constant + event.per_row * rows;
  }
  const double pages = event.traced.back() < 0 ? -kPagesBytes : kPagesBytes;
  if (rows >= rows_.back()) {
    return event.traced.back() * rows / rows_.back() + pages;
  }
  const auto behind = std::upper_bound(rows_.begin() + 1, rows_.end() - 1, rows) - rows_.begin();
  const double share = (rows - rows_[behind - 1]) / (rows_[behind] - rows_[behind - 1]);
  return event.traced[behind - 1] + share * (event.traced[behind] - event.traced[behind - 1]) +
         pages;
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
