#include <brimful/launch/global_sampler.h>
#include <brimful/sizer/step_input.h>
#include <c10/util/Exception.h>

#include <deque>
#include <utility>

#include "launch/permutation.h"
#include "launch/sharing.h"

namespace brimful {
namespace {

double low_half(uint64_t value) {
  return static_cast<double>(value & 0xffffffffU);
}

double high_half(uint64_t value) {
  return static_cast<double>(value >> 32);
}

void check(int rank, int world_size, const GlobalSamplerOptions& options) {
  TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "need 0 <= rank < world_size (rank: ", rank,
                    ", world_size: ", world_size, ")");
  TORCH_CHECK_VALUE(options.lag >= 1, "lag must be at least 1 (lag: ", options.lag, ")");
}

}  // namespace

struct GlobalSampler::State {
  enum class Pass { none, open, ended };

  State(size_t size, int rank, int world_size, GlobalSamplerOptions given)
      : size(size), rank(rank), world_size(world_size), options(std::move(given)) {
    check(rank, world_size, options);
  }

  const launch::Order& order_of_epoch() {
    if (!order) {
      order = launch::permutation(size, options.seed, epoch, options.shuffle);
    }
    return *order;
  }

  size_t rows_from(size_t begin) { return sharing->rows_from(order_of_epoch(), begin); }

  void begin_epoch(uint64_t which) {
    epoch = which;
    noted_row = 0;
    order.reset();
    counted.reset();
  }

  bool end_epoch_if_done() {
    const bool done = noted_row > 0 && rows_from(noted_row) == 0;
    if (done) {
      begin_epoch(epoch + 1);
    }
    return done;
  }

  void reset() {
    end_epoch_if_done();
    next_row = noted_row;
    handed.clear();
    pass = Pass::open;
  }

  std::optional<std::vector<size_t>> next_step() {
    if (pass == Pass::none) {
      reset();
    }
    const size_t rows = pass == Pass::ended ? 0 : rows_from(next_row);
    if (rows == 0) {
      return std::nullopt;
    }
    const auto ahead = static_cast<int64_t>(handed.size());
    TORCH_CHECK_VALUE(ahead < options.lag,
                      "the loader asks too far ahead: this batch's share depends on an outcome "
                      "that was not noted yet (batches not noted: ",
                      ahead, ", lag: ", options.lag,
                      "); pass a larger lag (num_workers * prefetch_factor + 2 for a DataLoader of "
                      "Python, max_jobs "
                      "+ 3 for LibTorch's), and give each step's outcome to note(), as "
                      "BatchSizer.batches does in Python");
    auto own = sharing->own(order_of_epoch(), next_row, rows, handed.size(), rank);
    next_row += rows;
    handed.push_back(rows);
    return own;
  }

  void regroup(int new_rank, int new_world_size, std::vector<int64_t> max_rows) {
    auto given = options;
    given.max_rows = std::move(max_rows);
    check(new_rank, new_world_size, given);
    sharing = sharing->among(new_world_size, given);
    rank = new_rank;
    world_size = new_world_size;
    options = std::move(given);
    counted.reset();
    next_row = noted_row;
    handed.clear();
  }

  void note(const std::vector<double>& work_ms) {
    TORCH_CHECK_VALUE(work_ms.empty() || work_ms.size() == static_cast<size_t>(world_size),
                      "an outcome has the times of other ranks than the sampler (times: ",
                      work_ms.size(), ", world_size: ", world_size,
                      "); make the sampler with the ranks of the model's process group");
    TORCH_CHECK_VALUE(!handed.empty(),
                      "an outcome was noted of a step that was not handed out (epoch: ", epoch,
                      ", row: ", noted_row,
                      "); note each step once: BatchSizer.batches does it by itself in Python");
    sharing->note(handed.front(), work_ms);
    noted_row += handed.front();
    handed.pop_front();
    if (handed.empty() && end_epoch_if_done()) {
      pass = Pass::ended;
    }
  }

  size_t batches() {
    if (!counted) {
      size_t count = 0;
      for (size_t begin = 0, rows = 0; (rows = rows_from(begin)) > 0; begin += rows) {
        count += rows > static_cast<size_t>(rank) ? 1 : 0;
      }
      counted = count;
    }
    return *counted;
  }

  GlobalSamplerState save() const;
  void load(const GlobalSamplerState& saved);

  const size_t size;
  int rank;
  int world_size;
  GlobalSamplerOptions options;
  std::unique_ptr<launch::Sharing> sharing;
  uint64_t epoch = 0;
  size_t noted_row = 0;  ///< of the epoch; those before it are done
  size_t next_row = 0;
  std::deque<size_t> handed;  ///< rows of each step that was handed out and not noted
  Pass pass = Pass::none;
  std::optional<launch::Order> order;  ///< of the epoch
  std::optional<size_t> counted;       ///< batches of the epoch
};

GlobalSamplerState GlobalSampler::State::save() const {
  GlobalSamplerState saved;
  saved["size"] = {static_cast<double>(size)};
  saved["order"] = {options.shuffle ? 1.0 : 0.0, low_half(options.seed), high_half(options.seed)};
  saved["epoch"] = {low_half(epoch), high_half(epoch)};
  saved["row"] = {static_cast<double>(noted_row)};
  sharing->save(saved);
  return saved;
}

void GlobalSampler::State::load(const GlobalSamplerState& saved) {
  const auto now = save();
  for (const auto* name : {"size", "order", "epoch", "row"}) {
    const auto found = saved.find(name);
    TORCH_CHECK_VALUE(found != saved.end() && found->second.size() == now.at(name).size(),
                      "the state is not a sampler's (missing or damaged: ", name,
                      "); load what state_dict() of a GlobalSampler returned");
  }
  TORCH_CHECK_VALUE(saved.at("size") == now.at("size"),
                    "the state is of another data set (rows: ", saved.at("size")[0],
                    ", here: ", size, ")");
  TORCH_CHECK_VALUE(saved.at("order") == now.at("order"),
                    "the state is of another order; pass the same shuffle and seed (shuffle: ",
                    saved.at("order")[0] != 0, ", seed modulo 2^32: ", saved.at("order")[1], ")");
  const double row = saved.at("row")[0];
  TORCH_CHECK_VALUE(row >= 0 && row <= static_cast<double>(size),
                    "the state is not a sampler's (row: ", row,
                    "); load what state_dict() of a GlobalSampler returned");
  auto read = sharing->among(world_size, options);
  read->load(saved);
  sharing = std::move(read);
  const auto& halves = saved.at("epoch");
  begin_epoch((static_cast<uint64_t>(halves[1]) << 32) + static_cast<uint64_t>(halves[0]));
  noted_row = static_cast<size_t>(row);
  handed.clear();
  pass = Pass::none;
}

GlobalSampler::GlobalSampler(size_t size, size_t batch_size, int rank, int world_size,
                             GlobalSamplerOptions options)
    : state_(std::make_shared<State>(size, rank, world_size, std::move(options))) {
  state_->sharing = launch::share_rows(size, batch_size, world_size, state_->options);
}

GlobalSampler::GlobalSampler(RowCosts costs, int rank, int world_size, GlobalSamplerOptions options)
    : state_(std::make_shared<State>(costs.of_row.size(), rank, world_size, std::move(options))) {
  state_->sharing = launch::share_costs(std::move(costs), world_size, state_->options);
}

void GlobalSampler::set_epoch(uint64_t epoch) {
  state_->end_epoch_if_done();
  if (epoch != state_->epoch) {
    state_->begin_epoch(epoch);
    state_->pass = State::Pass::none;
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

size_t GlobalSampler::handed_out() const {
  return state_->handed.size();
}

void GlobalSampler::note(const Outcome& outcome) {
  state_->note(outcome.work_ms);
}

void GlobalSampler::note(const std::vector<double>& work_ms) {
  state_->note(work_ms);
}

size_t GlobalSampler::batches() const {
  return state_->batches();
}

std::vector<int64_t> GlobalSampler::shares() const {
  return state_->sharing->shares(state_->order_of_epoch(), state_->noted_row);
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
