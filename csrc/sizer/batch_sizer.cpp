#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/pieces.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>

#include "base/format.h"

namespace brimful {
namespace {
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

std::vector<int> ranks_with(const std::vector<ControlRecord>& records, Verdict verdict) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (records[rank].verdict == verdict) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return ranks;
}

struct Running {
  explicit Running(bool& flag) : flag_(flag) {
    TORCH_CHECK_VALUE(
        !flag, "step is running already; a step cannot contain another one of the same sizer");
    flag = true;
  }
  ~Running() { flag_ = false; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  bool& flag_;
};
}  // namespace

BatchSizer::BatchSizer(StepGroup group, Transaction transaction, BatchSizerOptions options)
    : group_(std::move(group)), transaction_(std::move(transaction)), options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.max_retries >= 0,
                    "max_retries must not be negative (max_retries: ", options_.max_retries, ")");
  TORCH_CHECK_VALUE(options_.pieces >= 1,
                    "a batch has at least one piece (pieces: ", options_.pieces, ")");
}

double BatchSizer::own_weight(const StepInput& input) const {
  if (input.error) {
    return kUnknown;
  }
  if (!input.rows) {
    return 0;
  }
  if (input.weight) {
    return *input.weight;
  }
  return own_weights_ ? kUnknown : static_cast<double>(*input.rows);
}

int64_t BatchSizer::wanted_pieces(const StepInput& input) const {
  if (!input.rows) {
    return 1;
  }
  if (input.split) {
    return static_cast<int64_t>(input.split->size());
  }
  return piece_rows_ > 0 ? pieces_for(*input.rows, piece_rows_)
                         : std::min(options_.pieces, *input.rows);
}

void BatchSizer::adopt(const std::vector<ControlRecord>& records) {
  announced_total_ = next_total_weight(records);
  buffer_source_ = next_buffer_source(records);
  announced_pieces_ = 1;
  for (const auto& record : records) {
    announced_pieces_ = std::max<int64_t>(announced_pieces_, record.next_pieces);
  }
  agreed_ = true;
}

ControlRecord BatchSizer::record_for(Next next, const StepInput& input) const {
  ControlRecord record;
  record.next = next;
  record.next_weight = next == Next::yes ? own_weight(input) : (next == Next::no ? 0 : kUnknown);
  record.next_pieces = static_cast<uint16_t>(std::min<int64_t>(wanted_pieces(input), UINT16_MAX));
  return record;
}

void BatchSizer::announce_next(Next next, const StepInput& next_input) {
  next_ = record_for(next, next_input);
}

bool BatchSizer::begin_loop(Next next, const StepInput& first) {
  announce_next(next, first);
  at_end_ = false;
  const auto records = group_.exchange(next_);
  adopt(records);
  return !nobody_continues(records);
}

void BatchSizer::announce_failure(FailureKind kind, const std::string& text) {
  if (!agreed_) {
    group_.exchange({});  // the others begin their step with one
  }
  agreed_ = false;
  group_.run_failed(kind, text, {});
  group_.discard();
}

void BatchSizer::check_input(const StepInput& input) {
  if (input.error) {
    std::rethrow_exception(input.error);
  }
  TORCH_CHECK_VALUE(!input.rows || *input.rows > 0,
                    "the batch is empty (rows: 0); pass NO_DATA where this rank has none");
  if (input.weight) {
    TORCH_CHECK_VALUE(
        std::isfinite(*input.weight) && *input.weight >= 0,
        "the weight of a batch must be finite and not negative (weight: ", *input.weight, ")");
  }
  if (input.split) {
    const auto sum = std::accumulate(input.split->begin(), input.split->end(), int64_t{0});
    TORCH_CHECK_VALUE(
        input.rows && sum == *input.rows &&
            std::all_of(input.split->begin(), input.split->end(), [](auto n) { return n > 0; }),
        "split does not cover the batch (sum of split: ", sum, ", rows: ", input.rows.value_or(0),
        ")");
  }
  const auto limit = memory::stats(options_.device).limit_bytes;
  if (limit && limit != checked_limit_ && options_.required_bytes) {
    const auto required = options_.required_bytes();
    TORCH_CHECK_VALUE(
        *limit >= required,
        "the memory limit is below what parameters, gradients and optimizer state take (limit: ",
        format_bytes(*limit), ", needed before any sample: ", format_bytes(required),
        "); raise it or shard the model");
  }
  checked_limit_ = limit;
  group_.require_empty_gradients();
}

Outcome BatchSizer::step(const StepInput& input, const PieceWork& work) {
  const Running running(running_);
  ++calls_;
  std::exception_ptr bad_input;
  try {
    check_input(input);
    transaction_.capture();
  } catch (...) {
    bad_input = std::current_exception();
  }
  if (!agreed_) {
    adopt(group_.exchange(bad_input ? ControlRecord{}
                                    : record_for(input.rows ? Next::yes : Next::no, input)));
  }
  agreed_ = false;
  if (!bad_input && options_.lockstep && group_.world_size() > 1 && input.split &&
      static_cast<int64_t>(input.split->size()) != announced_pieces_) {
    bad_input = std::make_exception_ptr(c10::ValueError(
        {"step", "batch_sizer.cpp", 0},
        "in lockstep a split has as many pieces as the ranks agreed on (pieces of split: " +
            std::to_string(input.split->size()) + ", agreed: " + std::to_string(announced_pieces_) +
            ")"));
  }
  if (next_.next == Next::unknown) {
    next_.next_pieces =
        record_for(Next::unknown, input).next_pieces;  // as if the next batch were like this one
  }
  if (bad_input) {
    at_end_ = nobody_continues(group_.run_failed(FailureKind::error, describe(bad_input), next_));
    next_ = {};
    std::rethrow_exception(bad_input);
  }
  owed_ = false;
  try {
    auto outcome = run(input, work);
    next_ = {};
    ++steps_;
    return outcome;
  } catch (...) {
    if (owed_) {
      group_.run_failed(FailureKind::error, describe(std::current_exception()), next_);
    }
    next_ = {};
    group_.discard();
    transaction_.restore();
    throw;
  }
}

Outcome BatchSizer::run(const StepInput& input, const PieceWork& work) {
  const memory::PeakScope peak(options_.device);
  Outcome outcome;
  const bool lockstep = options_.lockstep && group_.world_size() > 1;
  const int64_t rows = input.rows.value_or(0);
  outcome.pieces = lockstep ? announced_pieces_ : wanted_pieces(input);
  StepGroup::Attempt attempt;
  attempt.lockstep = lockstep;
  attempt.buffer_source = buffer_source_;
  attempt.ref = std::isfinite(announced_total_) && announced_total_ > 0 ? announced_total_
                : last_total_ > 0                                       ? last_total_
                                                                        : 1;
  attempt.record = next_;
  attempt.record.verdict = input.rows ? Verdict::ok : Verdict::no_data;
  std::optional<Plan> plan;
  if (input.rows && !input.split && predicts()) {
    owed_ = true;  // the others wait in their step
    plan = plan_of(input, work);
    outcome.pieces = plan ? plan->pieces : outcome.pieces;
  }
  const auto watched =
      PieceWork{[&](int64_t first, int64_t end) {
                  auto piece = work.forward(first, end);
                  own_weights_ = own_weights_ || piece.weight != static_cast<double>(end - first);
                  return piece;
                },
                work.backward};
  while (true) {
    if (input.split && outcome.pieces == static_cast<int64_t>(input.split->size())) {
      attempt.split = *input.split;
    } else if (input.rows || lockstep) {
      attempt.split = split_rows(rows, outcome.pieces);
    }
    outcome.split = attempt.split;
    attempt.retries_left = outcome.retries < options_.max_retries;
    attempt.can_split = outcome.pieces < rows;
    owed_ = false;
    const auto result = group_.run(attempt, watched);
    if (settle_attempt(result, input, outcome)) {
      const double total = total_weight(result.records);
      group_.accept(total > 0 ? attempt.ref / total : 1, total > 0);
      last_total_ = total > 0 ? total : last_total_;
      outcome.loss = mean_loss(result.records);
      outcome.weight = total;
      outcome.last = nobody_continues(result.records);
      for (const auto& record : result.records) {
        outcome.work_ms.push_back(record.work_ms);
      }
      outcome.peak_bytes = peak.peak_bytes();
      outcome.pieces = static_cast<int64_t>(outcome.split.size());
      return outcome;
    }
    owed_ = true;
    group_.discard();
    transaction_.restore();
    ++outcome.retries;
    note_shortfall(result, plan, input.kind);
  }
}

bool BatchSizer::settle_attempt(const AttemptResult& result, StepInput input, Outcome& outcome) {
  using Own = AttemptResult::Own;
  AttemptNote note;
  note.pieces = static_cast<int64_t>(outcome.split.size());
  note.buckets_left = result.buckets_left;
  note.alone = result.retry_alone;
  if (result.retry_alone) {
    note.ran_out = {group_.rank()};
    outcome.attempts.push_back(note);
    split_finer(*input.rows, outcome);
    return false;
  }
  at_end_ = !result.records.empty() && nobody_continues(result.records);
  if (result.own == Own::error) {
    std::rethrow_exception(result.error);
  }
  const auto verdict = worst(result.records);
  if (result.records.empty() || is_failure(verdict)) {
    throw_failure(result, outcome);
  }
  if (verdict != Verdict::retry) {
    require_same_ref(result.records);
    outcome.attempts.push_back(note);
    adopt(result.records);
    return true;
  }
  note.ran_out = ranks_with(result.records, Verdict::retry);
  outcome.attempts.push_back(note);
  if (result.own == Own::out_of_memory) {
    split_finer(*input.rows, outcome);
  } else {
    log(LogLevel::info,
        "step " + std::to_string(steps_) + " is repeated for rank " + join(note.ran_out));
  }
  return false;
}

void BatchSizer::require_same_ref(const std::vector<ControlRecord>& records) {
  const auto others = ranks_with_another_ref(records);
  if (others.empty()) {
    return;
  }
  last_total_ = 0;  // on every rank: the next step works
  throw PlanMismatch(
      "the ranks divided the losses of step " + std::to_string(steps_) +
      " by different numbers, as if they had loaded different states (ranks that differ from rank "
      "0: " +
      join(others) + "); load a state_dict of the same step on every rank");
}

void BatchSizer::split_finer(int64_t rows, Outcome& outcome) {
  const auto before = static_cast<int64_t>(outcome.split.size());
  outcome.pieces = finer(rows, before);
  piece_rows_ = pieces_for(rows, outcome.pieces);
  std::ostringstream line;
  line << "rank " << group_.rank() << " ran out of memory in step " << steps_ << ": a batch of "
       << rows << " is repeated in " << outcome.pieces << " pieces instead of " << before;
  log(LogLevel::warning, line.str());
}

void BatchSizer::throw_failure(const AttemptResult& result, const Outcome& outcome) {
  const bool too_large =
      result.own == AttemptResult::Own::out_of_memory &&
      (result.records.empty() || result.records[group_.rank()].verdict == Verdict::failed_memory);
  if (too_large) {
    std::ostringstream text;
    text << (result.records.empty()
                 ? "in lockstep no rank may split further by itself: memory ran out"
                 : "no split of the batch fits")
         << " on rank " << group_.rank() << " (device: " << options_.device
         << ", pieces: " << outcome.split.size() << ", largest piece: "
         << (outcome.split.empty() ? 0
                                   : *std::max_element(outcome.split.begin(), outcome.split.end()))
         << " rows, retries: " << outcome.retries << ", max_retries: " << options_.max_retries
         << "); give the device more memory, use a smaller model or input, or checkpoint "
            "activations. The last error was: "
         << result.text;
    throw BatchTooLarge(text.str());
  }
  auto failed = ranks_with(result.records, Verdict::failed_memory);
  const bool memory = !failed.empty();
  if (!memory) {
    failed = ranks_with(result.records, Verdict::failed);
  }
  detail::throw_rank_failed(
      failed.empty() ? -1 : failed.front(), steps_,
      memory ? FailureKind::out_of_memory : FailureKind::error,
      "step " + std::to_string(steps_) + " failed on " +
          (result.records.empty() ? result.text : group_.failure_texts(result.records)));
}

std::map<std::string, double> BatchSizer::state() const {
  return {
      {"steps", static_cast<double>(steps_)},
      {"piece_rows", static_cast<double>(piece_rows_)},
      {"last_total", last_total_},
  };
}

void BatchSizer::load_state(const std::map<std::string, double>& state) {
  const auto get = [&](const char* name) {
    const auto found = state.find(name);
    TORCH_CHECK_VALUE(found != state.end(), "the sizer's state lacks an entry (name: ", name, ")");
    return found->second;
  };
  const double piece_rows = get("piece_rows");
  const double last_total = get("last_total");
  const double steps = get("steps");
  TORCH_CHECK_VALUE(piece_rows >= 0 && last_total >= 0 && steps >= 0,
                    "the sizer's state is not one that state_dict gave (piece_rows: ", piece_rows,
                    ", last_total: ", last_total, ", steps: ", steps, ")");
  piece_rows_ = static_cast<int64_t>(piece_rows);
  last_total_ = last_total;
  steps_ = static_cast<int64_t>(steps);
}

}  // namespace brimful
