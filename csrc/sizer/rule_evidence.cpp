#include "sizer/rule_evidence.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace brimful::detail {
namespace {
constexpr int64_t kMostTrials = 2;
constexpr int64_t kMostRules = 48;
constexpr int64_t kMostBegins = 512;  // windows that are looked at
constexpr double kNear = 4;           // times the distance of the best: the same but for rounding
constexpr double kEmptyPiece = 0.01;

/// Sums of each rule over rows.
class Counts {
 public:
  explicit Counts(const at::Tensor& counts) : sums_(counts.size(0)), rows_(counts.size(1)) {
    const auto table = counts.contiguous();
    const auto* value = table.const_data_ptr<double>();
    for (auto& sums : sums_) {
      sums.assign(1, 0);
      for (int64_t row = 0; row < rows_; ++row) {
        sums.push_back(sums.back() + *value++);
      }
    }
  }
  int64_t rows() const { return rows_; }
  double of(int64_t rule, int64_t begin, int64_t end) const {
    return sums_[rule][end] - sums_[rule][begin];
  }
  double share(int64_t rule, int64_t begin, int64_t cut, int64_t end) const {
    const auto all = of(rule, begin, end);
    return all > 0 ? of(rule, begin, cut) / all : std::numeric_limits<double>::quiet_NaN();
  }

 private:
  std::vector<std::vector<double>> sums_;
  int64_t rows_;
};

/// How much the shares of the first piece differ, over all pairs, and the most of any.
std::pair<double, double> differences(std::vector<double>& shares) {
  std::sort(shares.begin(), shares.end());
  double sum = 0;
  for (size_t i = 1; i < shares.size(); ++i) {
    sum += std::sqrt(shares[i] - shares[i - 1]);  // rather many pairs than much of one
  }
  return {sum, shares.empty() ? 0 : shares.back() - shares.front()};
}
}  // namespace

RuleEvidence::RuleEvidence(int64_t rules, int64_t sum)
    : rules_(rules), sum_(sum), agreeing_((uint64_t{1} << rules) - 1) {
  TORCH_CHECK_VALUE(rules >= 1 && rules <= kMostRules, "too many rules (rules: ", rules, ")");
}

bool RuleEvidence::is_done() const {
  return trials_ >= kMostTrials || refuses() || (trials_ > 0 && std::has_single_bit(agreeing_));
}

std::optional<TrialWindow> RuleEvidence::window(const at::Tensor& table, int64_t most_rows) const {
  const Counts counts(table);
  const auto rows = std::min(counts.rows(), most_rows);
  if (rows < 2 || is_done()) {
    return std::nullopt;
  }
  std::optional<TrialWindow> best;
  double most = -1;
  const auto stride = std::max<int64_t>(1, (counts.rows() - rows + 1) / kMostBegins);
  for (int64_t begin = 0; begin + rows <= counts.rows(); begin += stride) {
    for (int64_t cut = begin + 1; cut < begin + rows; ++cut) {
      std::vector<double> shares;
      bool has_empty = false;
      for (int64_t rule = 0; rule < rules_; ++rule) {
        const auto share = counts.share(rule, begin, cut, begin + rows);
        if (rule != sum_ && is_left(rule) && !std::isnan(share)) {
          has_empty = has_empty || share <= 0 || share >= 1;
          shares.push_back(share);
        }
      }
      const auto [score, widest] = differences(shares);
      const auto worth = has_empty ? kEmptyPiece * score : score;
      if (worth > most && (trials_ == 0 || widest > last_.tolerance)) {
        most = worth;
        best = TrialWindow{begin, cut, begin + rows};
      }
    }
  }
  return best;
}

std::vector<std::pair<double, double>> RuleEvidence::weights(const at::Tensor& table,
                                                             const TrialWindow& window) const {
  const Counts counts(table);
  std::vector<std::pair<double, double>> weights;
  for (int64_t rule = 0; rule < rules_; ++rule) {
    const auto share = counts.share(rule, window.begin, window.cut, window.end);
    weights.emplace_back(rule == sum_ ? 1 : share, rule == sum_ ? 1 : 1 - share);
  }
  return weights;
}

void RuleEvidence::learn(const LossTrial& trial) {
  if (!trial.comparable) {
    return;
  }
  ++trials_;
  const auto repeat_distance = std::max(last_.repeat_distance, trial.repeat_distance);
  last_ = trial;
  last_.repeat_distance = repeat_distance;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t rule = 0; rule < rules_; ++rule) {
    if (is_left(rule)) {
      least = std::min(least, trial.distances[rule]);
    }
  }
  const auto bound = std::min(trial.tolerance, std::max(kNear * least, trial.floor));
  for (int64_t rule = 0; rule < rules_; ++rule) {
    if (!(trial.distances[rule] <= bound)) {
      agreeing_ &= ~(uint64_t{1} << rule);
    }
  }
}

}  // namespace brimful::detail
