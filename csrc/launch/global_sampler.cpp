#include <brimful/launch/global_sampler.h>
#include <brimful/sizer/outcome.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "launch/permutation.h"
#include "launch/share_rule.h"

namespace brimful {
namespace {

using Rows = std::vector<int64_t>;

launch::ShareBounds bounds_of(size_t batch_size, int world_size,
                              const GlobalSamplerOptions& options) {
  const auto rows = static_cast<int64_t>(batch_size);
  TORCH_CHECK_VALUE(options.lag >= 1, "lag must be at least 1 (lag: ", options.lag, ")");
  TORCH_CHECK_VALUE(options.min_rows >= 1 && options.min_rows <= rows / world_size,
                    "a step needs min_rows for each rank (batch_size: ", rows,
                    ", world_size: ", world_size, ", min_rows: ", options.min_rows,
                    "); pass a larger batch_size, which is that of all ranks together");
  auto most = options.max_rows;
  if (most.empty()) {
    most.assign(world_size, rows);
  }
  TORCH_CHECK_VALUE(most.size() == static_cast<size_t>(world_size),
                    "max_rows needs a number for each rank (max_rows: ", most.size(),
                    " numbers, world_size: ", world_size, ")");
  int64_t all = 0;
  for (auto& rows_of_rank : most) {
    rows_of_rank = std::min(rows_of_rank, rows);
    TORCH_CHECK_VALUE(rows_of_rank >= options.min_rows,
                      "max_rows must be at least min_rows (max_rows: ", rows_of_rank,
                      ", min_rows: ", options.min_rows, ")");
    all += rows_of_rank;
  }
  TORCH_CHECK_VALUE(all >= rows, "the ranks' max_rows are fewer than a step has (max_rows: ", all,
                    " in all, batch_size: ", rows, "); pass a smaller batch_size");
  return {Rows(world_size, options.min_rows), std::move(most)};
}

std::vector<double> numbers(const Rows& rows) {
  return {rows.begin(), rows.end()};
}

double low_half(uint64_t value) {
  return static_cast<double>(value & 0xffffffffU);
}

double high_half(uint64_t value) {
  return static_cast<double>(value >> 32);
}

}  // namespace

struct GlobalSampler::State {
  State(size_t size, size_t batch_size, int rank, int world_size, GlobalSamplerOptions given)
      : size(size),
        batch_size(batch_size),
        rank(rank),
        world_size(world_size),
        options(std::move(given)) {
    TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "need 0 <= rank < world_size (rank: ", rank,
                      ", world_size: ", world_size, ")");
    bounds = bounds_of(batch_size, world_size, options);
    forget_speeds();
  }

  void forget_speeds() {
    const std::vector<double> alike(world_size, 1.0);
    history = {};
    history.shares = launch::allot(alike, static_cast<int64_t>(batch_size), bounds);
    upcoming.assign(options.lag, history.shares);
  }

  /// Of the step that begins at this row; 0: the epoch has none.
  size_t rows_from(size_t begin) const {
    const size_t left = size - begin;
    return left >= batch_size ? batch_size : options.drop_last ? 0 : left;
  }

  /// Of a step that may be an epoch's last one, of fewer rows.
  Rows scaled(const Rows& shares, size_t rows) const {
    if (rows == batch_size) {
      return shares;
    }
    const auto least = static_cast<int64_t>(rows) / world_size;
    if (least == 0) {
      Rows first(world_size, 0);
      std::fill_n(first.begin(), rows, 1);
      return first;
    }
    const Rows each(world_size, std::min(least, options.min_rows));
    return launch::allot(numbers(shares), static_cast<int64_t>(rows), {each, bounds.most});
  }

  void end_epoch_if_done() {
    if (noted_row > 0 && rows_from(noted_row) == 0) {
      ++epoch;
      noted_row = 0;
    }
  }

  void reset() {
    end_epoch_if_done();
    if (!order || order_epoch != epoch) {
      order = launch::permutation(size, options.seed, epoch, options.shuffle);
      order_epoch = epoch;
    }
    next_row = noted_row;
    ahead = 0;
  }

  std::optional<std::vector<size_t>> next_step() {
    if (!order) {
      reset();
    }
    const size_t rows = rows_from(next_row);
    if (rows == 0) {
      return std::nullopt;
    }
    TORCH_CHECK_VALUE(ahead < options.lag,
                      "a batch was asked for whose share depends on an outcome that was not noted "
                      "(asked for ahead: ",
                      ahead, ", lag: ", options.lag,
                      "); pass a larger lag (num_workers * prefetch_factor + 2 for a DataLoader of "
                      "Python, max_jobs "
                      "+ 3 for LibTorch's), and give each step's outcome to note(), as "
                      "BatchSizer.batches does in Python");
    const auto shares = scaled(upcoming[ahead], rows);
    const auto own = order->begin() + static_cast<std::ptrdiff_t>(next_row) +
                     std::accumulate(shares.begin(), shares.begin() + rank, int64_t{0});
    next_row += rows;
    ++ahead;
    return std::vector<size_t>(own, own + shares[rank]);
  }

  void regroup(int new_rank, int new_world_size, std::vector<int64_t> max_rows) {
    auto given = options;
    given.max_rows = std::move(max_rows);
    State other(size, batch_size, new_rank, new_world_size, given);
    bounds = std::move(other.bounds);
    rank = new_rank;
    world_size = new_world_size;
    options = std::move(given);
    forget_speeds();
    next_row = noted_row;
    ahead = 0;
  }

  void note(const std::vector<double>& work_ms) {
    TORCH_CHECK_VALUE(work_ms.empty() || work_ms.size() == static_cast<size_t>(world_size),
                      "an outcome has the times of other ranks than the sampler (times: ",
                      work_ms.size(), ", world_size: ", world_size,
                      "); make the sampler with the ranks of the model's process group");
    TORCH_CHECK_VALUE(ahead > 0,
                      "an outcome was noted of a step that was not handed out (epoch: ", epoch,
                      ", row: ", noted_row,
                      "); note each step once: BatchSizer.batches does it by itself in Python");
    const size_t rows = rows_from(noted_row);
    if (rows == batch_size && !work_ms.empty()) {
      launch::note_step(history, upcoming.front(), work_ms, options.lag, bounds);
    }
    upcoming.pop_front();
    upcoming.push_back(history.shares);
    noted_row += rows;
    --ahead;
    end_epoch_if_done();
  }

  GlobalSamplerState save() const;
  void load(const GlobalSamplerState& saved);
  void load_speeds(const GlobalSamplerState& saved);

  const size_t size;
  const size_t batch_size;
  int rank;
  int world_size;
  GlobalSamplerOptions options;
  launch::ShareBounds bounds;
  launch::ShareHistory history;
  std::deque<Rows> upcoming;  ///< shares of the steps behind the last one noted, `lag` of them
  uint64_t epoch = 0;
  size_t noted_row = 0;  ///< of the epoch; those before it are done
  size_t next_row = 0;
  int64_t ahead = 0;  ///< steps handed out and not noted
  std::optional<std::vector<size_t>> order;
  uint64_t order_epoch = 0;
};

GlobalSamplerState GlobalSampler::State::save() const {
  GlobalSamplerState saved;
  saved["size"] = {static_cast<double>(size)};
  saved["order"] = {options.shuffle ? 1.0 : 0.0, low_half(options.seed), high_half(options.seed)};
  saved["epoch"] = {low_half(epoch), high_half(epoch)};
  saved["row"] = {static_cast<double>(noted_row)};
  saved["split"] = {static_cast<double>(world_size), static_cast<double>(batch_size),
                    static_cast<double>(options.lag)};
  saved["rule"] = {static_cast<double>(history.unseen), history.pace, history.before_ms};
  saved["decided"] = numbers(history.shares);
  saved["slowest_ms"] = {history.slowest_ms.begin(), history.slowest_ms.end()};
  auto& shares = saved["shares"];
  for (const auto& step : upcoming) {
    shares.insert(shares.end(), step.begin(), step.end());
  }
  auto& speeds = saved["speeds"];
  for (const auto& step : history.speeds) {
    speeds.insert(speeds.end(), step.begin(), step.end());
  }
  return saved;
}

void GlobalSampler::State::load(const GlobalSamplerState& saved) {
  const auto now = save();
  for (const auto& [name, values] : now) {
    const auto found = saved.find(name);
    const bool any_length =
        name == "slowest_ms" || name == "shares" || name == "speeds" || name == "decided";
    TORCH_CHECK_VALUE(found != saved.end() && (any_length || found->second.size() == values.size()),
                      "the state is not a sampler's (missing or damaged: ", name, ")");
  }
  TORCH_CHECK_VALUE(saved.at("size") == now.at("size"),
                    "the state is of another data set (rows: ", saved.at("size")[0],
                    ", here: ", size, ")");
  TORCH_CHECK_VALUE(saved.at("order") == now.at("order"),
                    "the state is of another order; pass the same shuffle and seed (shuffle: ",
                    saved.at("order")[0] != 0, ", seed modulo 2^32: ", saved.at("order")[1], ")");
  const double row = saved.at("row")[0];
  TORCH_CHECK_VALUE(row >= 0 && row <= static_cast<double>(size),
                    "the state is not a sampler's (row: ", row, ")");
  const auto& halves = saved.at("epoch");
  epoch = (static_cast<uint64_t>(halves[1]) << 32) + static_cast<uint64_t>(halves[0]);
  noted_row = static_cast<size_t>(row);
  forget_speeds();
  if (saved.at("split") == now.at("split")) {
    load_speeds(saved);
  }
  order.reset();
  ahead = 0;
}

/// Shares that these bounds do not allow are left, and so are the speeds.
void GlobalSampler::State::load_speeds(const GlobalSamplerState& saved) {
  const auto ranks = static_cast<size_t>(world_size);
  const auto by_rank = [&](const std::vector<double>& values, auto add) {
    for (size_t begin = 0; begin + ranks <= values.size(); begin += ranks) {
      const auto from = values.begin() + static_cast<std::ptrdiff_t>(begin);
      add(from, from + world_size);
    }
  };
  launch::ShareHistory read;
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
      fine = of_step[i] >= bounds.least[i] && of_step[i] <= bounds.most[i];
    }
    return fine && std::accumulate(of_step.begin(), of_step.end(), int64_t{0}) ==
                       static_cast<int64_t>(batch_size);
  };
  if (shares.size() == upcoming.size() && allowed(read.shares) &&
      std::all_of(shares.begin(), shares.end(), allowed)) {
    history = std::move(read);
    upcoming = std::move(shares);
  }
}

GlobalSampler::GlobalSampler(size_t size, size_t batch_size, int rank, int world_size,
                             GlobalSamplerOptions options)
    : state_(std::make_shared<State>(size, batch_size, rank, world_size, std::move(options))) {}

void GlobalSampler::set_epoch(uint64_t epoch) {
  state_->end_epoch_if_done();
  if (epoch != state_->epoch) {
    state_->epoch = epoch;
    state_->noted_row = 0;
    state_->order.reset();
  }
}

void GlobalSampler::reset(std::optional<size_t> new_size) {
  TORCH_CHECK_VALUE(!new_size || *new_size == state_->size,
                    "a sampler's data set keeps its size (size: ", new_size.value_or(0),
                    ", before: ", state_->size, "); make another sampler");
  state_->reset();
}

std::optional<std::vector<size_t>> GlobalSampler::next() {
  auto rows = state_->next_step();
  return rows && rows->empty() ? std::nullopt : std::move(rows);
}

std::optional<std::vector<size_t>> GlobalSampler::next_step() {
  return state_->next_step();
}

void GlobalSampler::regroup(int rank, int world_size, std::vector<int64_t> max_rows) {
  state_->regroup(rank, world_size, std::move(max_rows));
}

void GlobalSampler::note(const Outcome& outcome) {
  state_->note(outcome.work_ms);
}

void GlobalSampler::note(const std::vector<double>& work_ms) {
  state_->note(work_ms);
}

size_t GlobalSampler::batches() const {
  const size_t whole = state_->size / state_->batch_size;
  const size_t tail = state_->rows_from(whole * state_->batch_size);
  const bool in_tail =
      tail >= static_cast<size_t>(state_->world_size) || tail > static_cast<size_t>(state_->rank);
  return whole + (in_tail ? 1 : 0);
}

std::vector<int64_t> GlobalSampler::shares() const {
  return state_->upcoming.front();
}

uint64_t GlobalSampler::epoch() const {
  return state_->epoch;
}

int64_t GlobalSampler::lag() const {
  return state_->options.lag;
}

GlobalSamplerState GlobalSampler::state() const {
  return state_->save();
}

void GlobalSampler::load_state(const GlobalSamplerState& state) {
  state_->load(state);
}

}  // namespace brimful
