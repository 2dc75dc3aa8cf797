#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/fnv.h"
#include "launch/cost_rule.h"
#include "launch/sharing.h"

namespace brimful::launch {
namespace {

constexpr int64_t kMostOfRow = int64_t{1} << 26;    // a double has its square exactly
constexpr int64_t kMostOfBatch = int64_t{1} << 53;  // so has the state this number

/// The same in all samplers of a job, and after another group was formed.
struct Costs {
  std::vector<int64_t> of_row;
  int64_t of_batch;
  int64_t most;          ///< that a row costs
  uint64_t fingerprint;  ///< of the rows' costs
};

std::shared_ptr<const Costs> checked(RowCosts given) {
  TORCH_CHECK_VALUE(given.of_batch >= 1 && given.of_batch <= kMostOfBatch,
                    "a batch costs at least 1 and at most 2^53 (batch_cost: ", given.of_batch, ")");
  int64_t most = 1;
  Fnv<uint64_t> fingerprint;
  for (size_t row = 0; row < given.of_row.size(); ++row) {
    const int64_t cost = given.of_row[row];
    TORCH_CHECK_VALUE(cost >= 1 && cost <= kMostOfRow,
                      "a row costs at least 1 and at most 2^26 (row: ", row, ", cost: ", cost,
                      "); pass its tokens, or leave the row out");
    most = std::max(most, cost);
    fingerprint.add_word(static_cast<uint64_t>(cost));
  }
  return std::make_shared<const Costs>(
      Costs{std::move(given.of_row), given.of_batch, most, fingerprint.value()});
}

/// A step's rows, the most costly first, and the ranges that the ranks take.
struct Cut {
  bool whole = false;  ///< not an epoch's last rows, which are fewer
  std::vector<size_t> rows;
  std::vector<std::pair<size_t, size_t>> of_rank;  ///< where it begins and ends
  std::vector<Load> before;                        ///< of the rows before each, and of all
};

/// What shares follow from.
struct Measured {
  std::vector<double> slowness;  ///< by rank
  int64_t place = 0;             ///< of the crossover

  bool operator==(const Measured&) const = default;
};

struct Handed {
  std::vector<Load> loads;  ///< by rank
  bool whole = false;
};

std::vector<Load> loads_of(const Cut& step) {
  std::vector<Load> loads;
  loads.reserve(step.of_rank.size());
  for (const auto& [from, to] : step.of_rank) {
    loads.push_back({step.before[to].linear - step.before[from].linear,
                     step.before[to].quadratic - step.before[from].quadratic});
  }
  return loads;
}

void append(std::vector<double>& to, const std::vector<double>& values) {
  to.insert(to.end(), values.begin(), values.end());
}

/// A step is the next rows that cost no more than a batch may.
class CostSharing final : public Sharing {
 public:
  CostSharing(std::shared_ptr<const Costs> costs, int world_size,
              const GlobalSamplerOptions& options)
      : costs_(std::move(costs)),
        ranks_(static_cast<size_t>(world_size)),
        lag_(options.lag),
        drop_last_(options.drop_last),
        least_(options.min_rows) {
    TORCH_CHECK_VALUE(least_ >= 1 && least_ <= costs_->of_batch / world_size,
                      "a step needs min_rows for each rank (batch_cost: ", costs_->of_batch,
                      ", world_size: ", world_size, ", min_rows: ", least_,
                      "); pass a larger batch_cost, which is that of all ranks together");
    const auto size = static_cast<int64_t>(costs_->of_row.size());
    most_ = most_rows(options, world_size, std::max(size, least_));
    history_.slowness.assign(ranks_, 0);
    history_.place = linear_place(costs_->most);
    upcoming_.assign(lag_, measured());
  }

  std::unique_ptr<Sharing> among(int world_size,
                                 const GlobalSamplerOptions& options) const override {
    return std::make_unique<CostSharing>(costs_, world_size, options);
  }

  size_t rows_from(const Order& order, size_t begin) const override {
    const auto found = batch_from(order, begin);
    return found.whole || !drop_last_ ? found.rows : 0;
  }

  std::vector<size_t> own(const Order& order, size_t begin, size_t rows, size_t ahead,
                          int rank) override {
    const auto found = cut(order, begin, rows, upcoming_[ahead]);
    handed_.resize(ahead);
    handed_.push_back({loads_of(found), found.whole});
    const auto [from, to] = found.of_rank[rank];
    const auto first = found.rows.begin();
    return {first + static_cast<std::ptrdiff_t>(from), first + static_cast<std::ptrdiff_t>(to)};
  }

  std::vector<int64_t> shares(const Order& order, size_t begin) const override {
    const size_t rows = rows_from(order, begin);
    if (rows == 0) {
      return std::vector<int64_t>(ranks_, 0);
    }
    std::vector<int64_t> shares;
    for (const auto& [from, to] : cut(order, begin, rows, upcoming_.front()).of_rank) {
      shares.push_back(static_cast<int64_t>(to - from));
    }
    return shares;
  }

  void note(size_t /*rows*/, const std::vector<double>& work_ms) override {
    auto& step = handed_.front();
    if (!work_ms.empty() && step.whole) {
      note_costs(history_, std::move(step.loads), work_ms, costs_->most);
    }
    handed_.pop_front();
    upcoming_.pop_front();
    upcoming_.push_back(measured());
  }

  void save(GlobalSamplerState& saved) const override;
  void load(const GlobalSamplerState& saved) override;

 private:
  struct Batch {
    size_t rows = 0;
    bool whole = false;  ///< one row more would be too many, or cost too much
  };

  Measured measured() const { return {known_slowness(history_), history_.place}; }
  Batch batch_from(const Order& order, size_t begin) const;
  Cut cut(const Order& order, size_t begin, size_t rows, const Measured& measured) const;
  void cut_among_ranks(Cut& step, const Measured& measured) const;
  std::vector<double> split() const {
    return {static_cast<double>(ranks_), static_cast<double>(costs_->of_batch),
            static_cast<double>(lag_)};
  }

  const std::shared_ptr<const Costs> costs_;
  const size_t ranks_;
  const int64_t lag_;
  const bool drop_last_;
  const int64_t least_;        ///< rows of a rank
  std::vector<int64_t> most_;  ///< by rank
  CostHistory history_;
  std::deque<Handed> handed_;      ///< steps that were not noted
  std::deque<Measured> upcoming_;  ///< of the steps behind the last one noted, `lag_` of them
};

CostSharing::Batch CostSharing::batch_from(const Order& order, size_t begin) const {
  const auto most = static_cast<size_t>(std::accumulate(most_.begin(), most_.end(), int64_t{0}));
  const size_t least = ranks_ * static_cast<size_t>(least_);
  int64_t left = costs_->of_batch;
  size_t end = begin;
  while (end < order.size() && end - begin < most) {
    const int64_t cost = costs_->of_row[order[end]];
    if (cost > left && end - begin >= least) {
      break;
    }
    left -= cost;
    ++end;
  }
  const bool full = end - begin == most || (end - begin >= least && left <= 0);
  return {end - begin, end < order.size() || full};
}

Cut CostSharing::cut(const Order& order, size_t begin, size_t rows,
                     const Measured& measured) const {
  Cut step;
  step.whole = begin + rows < order.size() || batch_from(order, begin).whole;
  const auto first = order.begin() + static_cast<std::ptrdiff_t>(begin);
  std::vector<int64_t> costs;
  costs.reserve(rows);
  std::transform(first, first + static_cast<std::ptrdiff_t>(rows), std::back_inserter(costs),
                 [this](size_t row) { return costs_->of_row[row]; });
  step.rows.reserve(rows);
  step.before.reserve(rows + 1);
  Load load;
  for (const size_t place : by_falling_cost(costs, costs_->most)) {
    step.rows.push_back(first[static_cast<std::ptrdiff_t>(place)]);
    step.before.push_back(load);
    load.linear += static_cast<double>(costs[place]);
    load.quadratic += static_cast<double>(costs[place] * costs[place]);
  }
  step.before.push_back(load);
  cut_among_ranks(step, measured);
  return step;
}

/// Which rank begins differs from step to step, so that each has long and short rows: else a rank's speed and what squares
/// cost would be one unknown. Of a step with fewer rows than ranks the first ranks have one each.
void CostSharing::cut_among_ranks(Cut& step, const Measured& measured) const {
  const size_t rows = step.rows.size();
  step.of_rank.assign(ranks_, {rows, rows});
  if (rows < ranks_) {
    for (size_t rank = 0; rank < rows; ++rank) {
      step.of_rank[rank] = {rank, rank + 1};
    }
    return;
  }
  const uint64_t mixed = (step.rows.front() + 1) * 0x9e3779b97f4a7c15U;
  const auto taker = [&, first = (mixed >> 32) % ranks_](size_t i) { return (first + i) % ranks_; };
  Takers takers;
  takers.least = std::min(least_, static_cast<int64_t>(rows / ranks_));
  for (size_t i = 0; i < ranks_; ++i) {
    takers.slowness.push_back(measured.slowness[taker(i)]);
    takers.most.push_back(most_[taker(i)]);
  }
  std::vector<double> before;
  before.reserve(rows + 1);
  const double crossover = crossover_at(measured.place);
  for (const auto& load : step.before) {
    before.push_back(cost_of(load, crossover));
  }
  size_t begin = 0;
  const auto ends = cut_by_cost(before, takers);
  for (size_t i = 0; i < ranks_; ++i) {
    step.of_rank[taker(i)] = {begin, ends[i]};
    begin = ends[i];
  }
}

void CostSharing::save(GlobalSamplerState& saved) const {
  saved["costs"] = {static_cast<double>(costs_->fingerprint & 0xffffffffU),
                    static_cast<double>(costs_->fingerprint >> 32)};
  saved["split"] = split();
  saved["crossover"] = {static_cast<double>(history_.place), static_cast<double>(history_.stride)};
  saved["slowness"] = history_.slowness;
  auto& upcoming = saved["upcoming"];
  auto& places = saved["upcoming_crossovers"];
  for (const auto& step : upcoming_) {
    append(upcoming, step.slowness);
    places.push_back(static_cast<double>(step.place));
  }
  auto& seen = saved["seen"];  // of each step times, linear and quadratic parts
  for (size_t i = 0; i < history_.ms.size(); ++i) {
    append(seen, history_.ms[i]);
    for (const auto& load : history_.loads[i]) {
      seen.push_back(load.linear);
    }
    for (const auto& load : history_.loads[i]) {
      seen.push_back(load.quadratic);
    }
  }
}

/// What is not of these ranks is left.
void CostSharing::load(const GlobalSamplerState& saved) {
  GlobalSamplerState now;
  save(now);
  TORCH_CHECK_VALUE(saved.contains("costs"),
                    "the state is of a sampler without cost; pass batch_size in the place of cost "
                    "and batch_cost");
  TORCH_CHECK_VALUE(saved.at("costs") == now.at("costs"),
                    "the state is of rows with other costs (rows: ", costs_->of_row.size(),
                    "); pass the same cost");
  for (const auto& [name, values] : now) {
    TORCH_CHECK_VALUE(saved.contains(name), "the state is not a sampler's (missing: ", name,
                      "); load what state_dict() of a GlobalSampler returned");
  }
  if (saved.at("split") != now.at("split")) {
    return;
  }
  const auto& crossover = saved.at("crossover");
  const auto& slowness = saved.at("slowness");
  const auto& upcoming = saved.at("upcoming");
  const auto& places = saved.at("upcoming_crossovers");
  const auto& seen = saved.at("seen");
  const auto fine = [](double number) { return std::isfinite(number) && number >= 0; };
  const int64_t linear = linear_place(costs_->most);
  const auto place = [linear](double number) {
    return number >= 0 && number <= static_cast<double>(linear);
  };
  TORCH_CHECK_VALUE(
      crossover.size() == 2 && place(crossover[0]) && std::isfinite(crossover[1]) &&
          slowness.size() == ranks_ && places.size() == upcoming_.size() &&
          upcoming.size() == ranks_ * places.size() && seen.size() % (3 * ranks_) == 0 &&
          std::all_of(slowness.begin(), slowness.end(), fine) &&
          std::all_of(upcoming.begin(), upcoming.end(),
                      [](double number) { return std::isfinite(number) && number > 0; }) &&
          std::all_of(places.begin(), places.end(), place) &&
          std::all_of(seen.begin(), seen.end(), fine),
      "the state is not a sampler's (damaged: ranks' times); load what state_dict() of a "
      "GlobalSampler returned");
  history_.place = static_cast<int64_t>(crossover[0]);
  history_.stride = static_cast<int64_t>(crossover[1]);
  history_.slowness = slowness;
  const auto row_of = [this](const std::vector<double>& values, size_t row) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row * ranks_);
    return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(ranks_));
  };
  for (size_t i = 0; i < places.size(); ++i) {
    upcoming_[i] = {row_of(upcoming, i), static_cast<int64_t>(places[i])};
  }
  for (size_t i = 0; i + 2 < seen.size() / ranks_; i += 3) {
    history_.ms.push_back(row_of(seen, i));
    std::vector<Load> loads(ranks_);
    for (size_t rank = 0; rank < ranks_; ++rank) {
      loads[rank] = {seen[(i + 1) * ranks_ + rank], seen[(i + 2) * ranks_ + rank]};
    }
    history_.loads.push_back(std::move(loads));
  }
}

}  // namespace

std::unique_ptr<Sharing> share_costs(RowCosts costs, int world_size,
                                     const GlobalSamplerOptions& options) {
  return std::make_unique<CostSharing>(checked(std::move(costs)), world_size, options);
}

}  // namespace brimful::launch
