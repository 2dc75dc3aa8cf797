#pragma once
#include <brimful/reducer/bucket_plan.h>
#include <brimful/reducer/step_times.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace brimful {

/// Time of a collective as a line: start-up cost and bandwidth (Hockney 1994, "The communication challenge for MPP").
struct WireCost {
  double startup_ms = 0;
  double ms_per_byte = 0;
};

/// Least squares over (bytes, ms) of collectives that ran alone; nothing if their sizes do not differ. Not negative.
std::optional<WireCost> fit_wire_cost(const std::vector<std::pair<double, double>>& samples);

/// End of the last collective in ms when buckets of these sizes become ready at these times and travel one after another.
double predict_end_ms(const std::vector<std::pair<double, double>>& ready_ms_and_bytes,
                      const WireCost& cost);

/// Finds the bucket plan on rank 0: the order of gradients from the first step; then, where sizes are free, each cap that
/// the fitted cost does not rule out is tried for some steps in turn, and the fastest stays. Pure but for its memory of
/// what it was given.
class Planner {
 public:
  Planner(std::vector<ParameterInfo> parameters, PlanOptions options, bool tune_sizes);

  /// After a step that was accepted: in what order gradients came (those that did not are left out), its times, and the
  /// ms from its first gradient to its end. Returns a plan to change to.
  std::optional<BucketPlan> observe(const BucketPlan& current, const std::vector<int64_t>& arrivals,
                                    const StepTimes& times, double span_ms);
  bool done() const { return phase_ == Phase::done; }
  bool tunes_sizes() const { return tune_sizes_; }
  /// What was measured; empty before the end.
  const std::string& report() const { return report_; }

 private:
  enum class Phase { order, cost, trial, done };
  struct Candidate {
    int64_t cap_bytes = 0;
    BucketPlan plan;
    std::vector<double> spans_ms;
  };
  void learn_order(const std::vector<int64_t>& arrivals);
  void collect_cost(const StepTimes& times);
  void make_candidates(const StepTimes& times, const std::vector<int64_t>& arrivals);
  std::optional<BucketPlan> next_trial(const BucketPlan& current);
  std::optional<BucketPlan> choose(const BucketPlan& current);

  std::vector<ParameterInfo> parameters_;
  PlanOptions options_;
  bool tune_sizes_;
  Phase phase_ = Phase::order;
  int steps_in_phase_ = 0;
  std::vector<std::pair<double, double>> cost_samples_;
  std::vector<Candidate> candidates_;
  size_t trial_ = 0;  ///< which candidate runs
  int round_ = 0;
  std::string report_;
};

}  // namespace brimful
