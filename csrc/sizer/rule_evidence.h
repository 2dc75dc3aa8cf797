#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "sizer/loss_trial.h"

namespace brimful::detail {

/// Which rules the loss of a kind of batch was seen to follow. A rule says what each row counts; the loss of a batch is the
/// mean over what counts, or with the rule `sum` the sum of its pieces' losses.
class BRIMFUL_API RuleEvidence {
 public:
  RuleEvidence(int64_t rules, int64_t sum);

  /// Rows on which the rules that are left would differ most, of this batch; nothing where they do not differ, or enough was
  /// tried. `counts`: float64, of each rule in each row. The first trial needs no difference.
  std::optional<TrialWindow> window(const at::Tensor& counts, int64_t most_rows) const;
  std::vector<std::pair<double, double>> weights(const at::Tensor& counts,
                                                 const TrialWindow& window) const;
  void learn(const LossTrial& trial);
  /// Rules that agree with all that was seen.
  uint64_t agreeing() const { return agreeing_; }
  /// Nothing is left to try.
  bool is_done() const;
  /// A trial has said something.
  bool knows() const { return trials_ > 0; }
  /// A trial was repeated, and gave the same.
  bool repeats() const { return last_.repeat_distance <= last_.tolerance; }
  /// What refuses a batch: no rule is left, or the loss does not repeat.
  bool refuses() const { return knows() && (agreeing_ == 0 || !repeats()); }
  /// Of the last trial that said something.
  const LossTrial& last() const { return last_; }

 private:
  bool is_left(int64_t rule) const { return (agreeing_ >> rule & 1) != 0; }

  int64_t rules_;
  int64_t sum_;
  uint64_t agreeing_;
  int64_t trials_ = 0;
  LossTrial last_;
};

}  // namespace brimful::detail
