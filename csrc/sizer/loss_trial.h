#pragma once
#include <brimful/sizer/verify_split.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace brimful::detail {

/// Rows of a batch that are run whole, and in two pieces.
struct TrialWindow {
  int64_t begin = 0;
  int64_t cut = 0;
  int64_t end = 0;
};

struct TrialPlan {
  TrialWindow window;
  /// By rule: what the losses of the two pieces are multiplied by, for their sum to be the loss of the whole. NaN: the rule
  /// says nothing of these rows.
  std::vector<std::pair<double, double>> weights;
  bool repeats = true;                       ///< run the whole twice: whether it is the same again
  bool gradients = true;                     ///< false: compare the losses alone, without a graph
  double seed = 1;                           ///< of each backward; distances are relative
  std::function<double()> coarsest_epsilon;  ///< of what the runs cast to, asked for after them
};

/// How a few rows compare with their pieces under each rule.
struct LossTrial {
  bool comparable = false;  ///< false: nothing is there to compare, such as gradients that are zero
  double repeat_distance = 0;
  double tolerance = 0;  ///< within which gradients are the same but for rounding
  double floor = 0;      ///< what rounding explains whatever the rest
  std::vector<double>
      distances;  ///< by rule, relative to the whole; infinite where a rule says nothing
};

/// Runs the window whole, again, and in its pieces, each from the same buffers and random numbers, and compares what gradients
/// come by random projections. Buffers, random numbers, gradients and the batch are left as they were; hooks on
/// parameters are the caller's to silence.
BRIMFUL_API LossTrial try_loss(const std::vector<at::Tensor>& parameters, Transaction& transaction,
                               const VerifyWork& work, const TrialPlan& plan);

}  // namespace brimful::detail
