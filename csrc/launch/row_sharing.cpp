#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "launch/share_rule.h"
#include "launch/sharing.h"

namespace brimful::launch {
namespace {

using Rows = std::vector<int64_t>;

ShareBounds bounds_of_rows(size_t batch_size, int world_size, const GlobalSamplerOptions& options) {
  const auto rows = static_cast<int64_t>(batch_size);
  TORCH_CHECK_VALUE(options.min_rows >= 1 && options.min_rows <= rows / world_size,
                    "a step needs min_rows for each rank (batch_size: ", rows,
                    ", world_size: ", world_size, ", min_rows: ", options.min_rows,
                    "); pass a larger batch_size, which is that of all ranks together");
  auto most = most_rows(options, world_size, rows);
  const auto all = std::accumulate(most.begin(), most.end(), int64_t{0});
  TORCH_CHECK_VALUE(all >= rows, "the ranks' max_rows are fewer than a step has (max_rows: ", all,
                    " in all, batch_size: ", rows, "); pass a smaller batch_size");
  return {Rows(world_size, options.min_rows), std::move(most)};
}

std::vector<double> numbers(const Rows& rows) {
  return {rows.begin(), rows.end()};
}

/// A step is `batch_size` rows, and a rank's share a range of them.
class RowSharing final : public Sharing {
 public:
  RowSharing(size_t size, size_t batch_size, int world_size, const GlobalSamplerOptions& options)
      : size_(size),
        batch_size_(batch_size),
        world_size_(world_size),
        lag_(options.lag),
        drop_last_(options.drop_last),
        bounds_(bounds_of_rows(batch_size, world_size, options)) {
    const std::vector<double> alike(world_size, 1.0);
    history_.shares = allot(alike, static_cast<int64_t>(batch_size), bounds_);
    upcoming_.assign(options.lag, history_.shares);
  }

  std::unique_ptr<Sharing> among(int world_size,
                                 const GlobalSamplerOptions& options) const override {
    return share_rows(size_, batch_size_, world_size, options);
  }

  size_t rows_from(const Order& /*order*/, size_t begin) const override {
    const size_t left = size_ - begin;
    return left >= batch_size_ ? batch_size_ : drop_last_ ? 0 : left;
  }

  std::vector<size_t> own(const Order& order, size_t begin, size_t rows, size_t ahead,
                          int rank) override {
    const auto shares = scaled(upcoming_[ahead], rows);
    const auto first = order.begin() + static_cast<std::ptrdiff_t>(begin) +
                       std::accumulate(shares.begin(), shares.begin() + rank, int64_t{0});
    return {first, first + shares[rank]};
  }

  std::vector<int64_t> shares(const Order& /*order*/, size_t /*begin*/) const override {
    return upcoming_.front();
  }

  void note(size_t rows, const std::vector<double>& work_ms) override {
    if (rows == batch_size_ && !work_ms.empty()) {
      note_step(history_, upcoming_.front(), work_ms, lag_, bounds_);
    }
    upcoming_.pop_front();
    upcoming_.push_back(history_.shares);
  }

  void save(GlobalSamplerState& saved) const override;
  void load(const GlobalSamplerState& saved) override;

 private:
  /// Of a step that may be an epoch's last one, of fewer rows.
  Rows scaled(const Rows& shares, size_t rows) const {
    if (rows == batch_size_) {
      return shares;
    }
    const auto least = static_cast<int64_t>(rows) / world_size_;
    if (least == 0) {
      Rows first(world_size_, 0);
      std::fill_n(first.begin(), rows, 1);
      return first;
    }
    const Rows each(world_size_, std::min(least, bounds_.least.front()));
    return allot(numbers(shares), static_cast<int64_t>(rows), {each, bounds_.most});
  }

  std::vector<double> split() const {
    return {static_cast<double>(world_size_), static_cast<double>(batch_size_),
            static_cast<double>(lag_)};
  }

  const size_t size_;
  const size_t batch_size_;
  const int world_size_;
  const int64_t lag_;
  const bool drop_last_;
  const ShareBounds bounds_;
  ShareHistory history_;
  std::deque<Rows> upcoming_;  ///< shares of the steps behind the last one noted, `lag_` of them
};

void RowSharing::save(GlobalSamplerState& saved) const {
  saved["split"] = split();
  saved["rule"] = {static_cast<double>(history_.unseen), history_.pace, history_.before_ms};
  saved["decided"] = numbers(history_.shares);
  saved["slowest_ms"] = {history_.slowest_ms.begin(), history_.slowest_ms.end()};
  auto& shares = saved["shares"];
  for (const auto& step : upcoming_) {
    shares.insert(shares.end(), step.begin(), step.end());
  }
  auto& speeds = saved["speeds"];
  for (const auto& step : history_.speeds) {
    speeds.insert(speeds.end(), step.begin(), step.end());
  }
}

/// Shares that these bounds do not allow are left, and so are the speeds.
void RowSharing::load(const GlobalSamplerState& saved) {
  TORCH_CHECK_VALUE(!saved.contains("costs"),
                    "the state is of a sampler with cost; pass the same cost and batch_cost");
  for (const auto& [name, count] : {std::pair{"split", 3}, {"rule", 3}}) {
    const auto found = saved.find(name);
    TORCH_CHECK_VALUE(found != saved.end() && found->second.size() == static_cast<size_t>(count),
                      "the state is not a sampler's (missing or damaged: ", name,
                      "); load what state_dict() of a GlobalSampler returned");
  }
  for (const auto* name : {"decided", "shares", "slowest_ms", "speeds"}) {
    TORCH_CHECK_VALUE(saved.contains(name),
                      "the state is not a sampler's (missing or damaged: ", name,
                      "); load what state_dict() of a GlobalSampler returned");
  }
  if (saved.at("split") != split()) {
    return;
  }
  const auto ranks = static_cast<size_t>(world_size_);
  const auto by_rank = [&](const std::vector<double>& values, auto add) {
    for (size_t begin = 0; begin + ranks <= values.size(); begin += ranks) {
      const auto from = values.begin() + static_cast<std::ptrdiff_t>(begin);
      add(from, from + world_size_);
    }
  };
  ShareHistory read;
  std::deque<Rows> shares;
  by_rank(saved.at("speeds"), [&](auto begin, auto end) { read.speeds.emplace_back(begin, end); });
  by_rank(saved.at("shares"), [&](auto begin, auto end) { shares.emplace_back(begin, end); });
  by_rank(saved.at("decided"), [&](auto begin, auto end) { read.shares.assign(begin, end); });
  const auto& slowest = saved.at("slowest_ms");
  read.slowest_ms.assign(slowest.begin(), slowest.end());
  const auto& rule = saved.at("rule");
  read.unseen = static_cast<int64_t>(rule[0]);
  read.pace = rule[1];
  read.before_ms = rule[2];
  const auto allowed = [&](const Rows& of_step) {
    bool fine = of_step.size() == ranks;
    for (size_t i = 0; fine && i < ranks; ++i) {
      fine = of_step[i] >= bounds_.least[i] && of_step[i] <= bounds_.most[i];
    }
    return fine && std::accumulate(of_step.begin(), of_step.end(), int64_t{0}) ==
                       static_cast<int64_t>(batch_size_);
  };
  if (shares.size() == upcoming_.size() && allowed(read.shares) &&
      std::all_of(shares.begin(), shares.end(), allowed)) {
    history_ = std::move(read);
    upcoming_ = std::move(shares);
  }
}

}  // namespace

std::unique_ptr<Sharing> share_rows(size_t size, size_t batch_size, int world_size,
                                    const GlobalSamplerOptions& options) {
  return std::make_unique<RowSharing>(size, batch_size, world_size, options);
}

std::vector<int64_t> most_rows(const GlobalSamplerOptions& options, int world_size, int64_t rows) {
  auto most = options.max_rows;
  if (most.empty()) {
    most.assign(world_size, rows);
  }
  TORCH_CHECK_VALUE(most.size() == static_cast<size_t>(world_size),
                    "max_rows needs a number for each rank (max_rows: ", most.size(),
                    " numbers, world_size: ", world_size, ")");
  for (auto& rows_of_rank : most) {
    rows_of_rank = std::min(rows_of_rank, rows);
    TORCH_CHECK_VALUE(rows_of_rank >= options.min_rows,
                      "max_rows must be at least min_rows (max_rows: ", rows_of_rank,
                      ", min_rows: ", options.min_rows, ")");
  }
  return most;
}

}  // namespace brimful::launch
