#include "reducer/planner.h"

#include <algorithm>
#include <numeric>

#include "base/format.h"
#include "base/text_stream.h"
#include "base/units.h"

namespace brimful {
namespace {
constexpr int kCostSteps = 3;
constexpr int kRounds = 4;
constexpr int kStepsPerTrial = 3;   // the first one is not counted: its memory is new
constexpr double kRuledOut = 1.25;  // candidates whose predicted end is this much above the least
constexpr size_t kAlwaysTried = 3;  // the best of the prediction
constexpr double kWorthIt = 0.98;   // of the present plan's time, or it stays

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}
}  // namespace

std::optional<WireCost> fit_wire_cost(const std::vector<std::pair<double, double>>& samples) {
  const auto count = static_cast<double>(samples.size());
  double x = 0;
  double y = 0;
  for (const auto& [bytes, ms] : samples) {
    x += bytes / count;
    y += ms / count;
  }
  double xx = 0;
  double xy = 0;
  for (const auto& [bytes, ms] : samples) {
    xx += (bytes - x) * (bytes - x);
    xy += (bytes - x) * (ms - y);
  }
  if (xx == 0) {
    return std::nullopt;
  }
  const double slope = std::max(0.0, xy / xx);
  return WireCost{std::max(0.0, y - slope * x), slope};
}

double predict_end_ms(const std::vector<std::pair<double, double>>& ready_ms_and_bytes,
                      const WireCost& cost) {
  double end = 0;
  for (const auto& [ready, bytes] : ready_ms_and_bytes) {
    end = std::max(end, ready) + cost.startup_ms + cost.ms_per_byte * bytes;
  }
  return end;
}

Planner::Planner(std::vector<ParameterInfo> parameters, PlanOptions options, bool tune_sizes)
    : parameters_(std::move(parameters)), options_(std::move(options)), tune_sizes_(tune_sizes) {}

std::optional<BucketPlan> Planner::observe(const BucketPlan& current,
                                           const std::vector<int64_t>& arrivals,
                                           const StepTimes& times, double span_ms) {
  ++steps_in_phase_;
  switch (phase_) {
    case Phase::order: {
      learn_order(arrivals);
      phase_ = tune_sizes_ ? Phase::cost : Phase::done;
      steps_in_phase_ = 0;
      auto plan = plan_buckets(parameters_, options_);
      return to_json(plan) == to_json(current) ? std::nullopt : std::optional(std::move(plan));
    }
    case Phase::cost:
      collect_cost(times);
      if (steps_in_phase_ < kCostSteps) {
        return std::nullopt;
      }
      make_candidates(times, arrivals);
      if (candidates_.size() < 2) {
        return choose(current);
      }
      phase_ = Phase::trial;
      steps_in_phase_ = 0;
      return candidates_[0].plan;
    case Phase::trial:
      if (steps_in_phase_ > 1) {
        candidates_[trial_].spans_ms.push_back(span_ms);
      }
      return steps_in_phase_ < kStepsPerTrial ? std::nullopt : next_trial(current);
    case Phase::done:
      break;
  }
  return std::nullopt;
}

void Planner::learn_order(const std::vector<int64_t>& arrivals) {
  std::vector<bool> came(parameters_.size(), false);
  options_.order.clear();
  for (const auto i : arrivals) {
    if (!came[i]) {
      came[i] = true;
      options_.order.push_back(i);
    }
  }
  for (auto i = static_cast<int64_t>(parameters_.size()) - 1; i >= 0; --i) {
    if (!came[i]) {
      options_.order.push_back(i);  // unused ones go last, where they delay no other
    }
  }
}

void Planner::collect_cost(const StepTimes& times) {
  double before = 0;
  for (const auto& bucket : times.buckets) {
    cost_samples_.emplace_back(static_cast<double>(bucket.bytes),
                               bucket.done_ms - std::max(bucket.launch_ms, before));
    before = bucket.done_ms;
  }
}

namespace {
/// By parameter. Gradients come evenly between the first bucket's first and the last one's last: enough to rule out.
std::vector<double> ready_ms_of(const StepTimes& times, const std::vector<int64_t>& arrivals,
                                size_t parameters) {
  double begin = times.total_ms;
  double end = 0;
  for (const auto& bucket : times.buckets) {
    if (bucket.first_ms > 0) {
      begin = std::min(begin, bucket.first_ms);
      end = std::max(end, bucket.ready_ms);
    }
  }
  std::vector<double> ready(parameters, end);
  for (size_t k = 0; k < arrivals.size(); ++k) {
    ready[arrivals[k]] =
        begin + (end - begin) * static_cast<double>(k + 1) / static_cast<double>(arrivals.size());
  }
  return ready;
}
}  // namespace

void Planner::make_candidates(const StepTimes& times, const std::vector<int64_t>& arrivals) {
  const auto cost = fit_wire_cost(cost_samples_);
  TextStream report;
  if (cost) {
    report << "a collective takes " << cost->startup_ms << " ms and "
           << cost->ms_per_byte * static_cast<double>(kMiB) << " ms a MiB\n";
  }
  const auto ready = ready_ms_of(times, arrivals, parameters_.size());
  std::vector<double> predicted;
  for (const int64_t cap : {25 * kMiB, kMiB, 5 * kMiB, 10 * kMiB, 50 * kMiB, int64_t{1} << 50}) {
    auto options = options_;
    options.bucket_bytes = cap;
    options.first_bucket_bytes =
        cap == 25 * kMiB ? options.first_bucket_bytes : cap;  // the present plan is the first
    auto plan = plan_buckets(parameters_, options);
    const bool known = std::any_of(
        candidates_.begin(), candidates_.end(),
        [&](const auto& candidate) { return to_json(candidate.plan) == to_json(plan); });
    if (known) {
      continue;
    }
    std::vector<std::pair<double, double>> buckets;
    for (const auto& bucket : plan.buckets) {
      double last = 0;
      double bytes = 0;
      for (const auto i : bucket.parameters) {
        last = std::max(last, ready[i]);
        bytes += static_cast<double>(parameters_[i].bytes());
      }
      buckets.emplace_back(last, bytes);
    }
    predicted.push_back(cost ? predict_end_ms(buckets, *cost) : 0);
    candidates_.push_back({cap, std::move(plan), {}});
  }
  auto sorted = predicted;
  std::sort(sorted.begin(), sorted.end());
  const double bar =
      std::max(kRuledOut * sorted[0], sorted[std::min(kAlwaysTried, sorted.size()) - 1]);
  std::vector<Candidate> kept;
  for (size_t k = 0; k < candidates_.size(); ++k) {
    if (k == 0 || predicted[k] <= bar) {
      kept.push_back(std::move(candidates_[k]));
    } else {
      report << "cap " << format_bytes(candidates_[k].cap_bytes) << ": ruled out, predicted end "
             << predicted[k] << " ms\n";
    }
  }
  candidates_ = std::move(kept);
  report_ = report.str();
}

std::optional<BucketPlan> Planner::next_trial(const BucketPlan& current) {
  steps_in_phase_ = 0;
  trial_ = (trial_ + 1) % candidates_.size();
  if (trial_ == 0 && ++round_ == kRounds) {
    return choose(current);
  }
  return candidates_[trial_].plan;
}

std::optional<BucketPlan> Planner::choose(const BucketPlan& current) {
  phase_ = Phase::done;
  TextStream report;
  size_t best = 0;
  double least = 0;
  for (size_t k = 0; k < candidates_.size(); ++k) {
    const auto& candidate = candidates_[k];
    if (candidate.spans_ms.empty()) {
      continue;
    }
    const double span = median(candidate.spans_ms);
    report << "cap "
           << (candidate.cap_bytes > (int64_t{1} << 40) ? "none"
                                                        : format_bytes(candidate.cap_bytes))
           << ": " << candidate.plan.buckets.size() << " buckets, backward and wait " << span
           << " ms\n";
    if (k == 0) {
      least = span * kWorthIt;
    } else if (span < least) {
      best = k;
      least = span;
    }
  }
  report_ += report.str();
  auto& plan = candidates_[best].plan;
  return to_json(plan) == to_json(current) ? std::nullopt : std::optional(std::move(plan));
}

}  // namespace brimful
