#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/rule_vote.h>
#include <brimful/step/pieces.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/format.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/loss_scale.h"
#include "step/behind_error.h"
#include "step/inner_collectives.h"
#include "step/kept_gradients.h"
#include "step/no_capture.h"
#include "step/one_call.h"

namespace brimful {
namespace {
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

/// Divides the peak among what is known to be held, and the rest.
void divide(Plan& plan, const StandingBytes& standing) {
  int64_t rest = plan.peak_bytes;
  const auto take = [&](int64_t bytes) {
    const auto taken = std::min(bytes, rest);
    rest -= taken;
    return taken;
  };
  plan.parameter_bytes = take(standing.parameters);
  plan.optimizer_bytes = take(standing.optimizer_state.value_or(0));
  plan.buffer_bytes = take(standing.buffers);
  plan.gradient_bytes = take(standing.trainable);
  plan.activation_bytes = rest;
}
}  // namespace

BatchSizer::State::State(StepGroup group, Transaction transaction, BatchSizerOptions options)
    : engine_(std::move(group), std::move(transaction), options.local, "sizer"),
      options_(std::move(options)),
      norms_(options_.batch_norm, options_.batch_norms),
      splitting_(options_, engine_.group()),
      forecaster_(engine_, options_, splitting_) {
  rule_.pending = options_.finds_rule;
  if (options_.ladder && !options_.lockstep && (options_.recompute || options_.offload)) {
    ladder_.ladder.emplace(options_.ladder, options_.device, options_.recompute, options_.offload);
  }
  TORCH_CHECK_VALUE(options_.max_retries >= 0,
                    "max_retries must not be negative (max_retries: ", options_.max_retries, ")");
  TORCH_CHECK_VALUE(options_.pieces >= 1,
                    "a batch has at least one piece (pieces: ", options_.pieces, ")");
  TORCH_CHECK_VALUE(!options_.piece_rows || (*options_.piece_rows >= 1 && options_.pieces == 1),
                    "piece_rows must be positive, and excludes pieces (piece_rows: ",
                    options_.piece_rows.value_or(0), ", pieces: ", options_.pieces,
                    "); pass one of them");
  if (!options_.required_bytes && options_.standing_bytes) {
    options_.required_bytes = [standing_bytes = options_.standing_bytes] {
      const auto bytes = standing_bytes();
      return bytes.parameters + bytes.trainable + bytes.optimizer_state.value_or(0);
    };
  }
  if (options_.scaler != nullptr && options_.scaler->enabled()) {
    const auto [scale, growth_tracker] = options_.scaler->tensors(options_.device);
    engine_.before().transaction().add(keeper_of({scale, growth_tracker}));
  }
}

void BatchSizer::State::regrouped() {
  const auto entered = engine_.enter("regrouped");
  engine_.regrouped();
  rule_.pending = options_.finds_rule;
}

double BatchSizer::State::own_weight(const StepInput& input) const {
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

void BatchSizer::State::adopt(const std::vector<ControlRecord>& records) {
  engine_.adopt(records);
  if (rule_.pending) {
    engine_.expire();
  }
}

ControlRecord BatchSizer::State::record_for(Next next, const StepInput& input) const {
  ControlRecord record;
  record.next = next;
  record.stop = stop_to_send();
  record.next_weight = next == Next::yes ? own_weight(input) : (next == Next::no ? 0 : kUnknown);
  record.next_pieces =
      static_cast<uint16_t>(std::min<int64_t>(splitting_.wanted_pieces(input), UINT16_MAX));
  return record;
}

void BatchSizer::State::announce_next(Next next, const StepInput& next_input) {
  const auto entered = engine_.enter("announce_next");
  engine_.announce_next(record_for(next, next_input));
}

bool BatchSizer::State::begin_loop(Next next, const StepInput& first) {
  const auto entered = engine_.enter("begin_loop");
  const bool any = engine_.begin_loop([&] { return record_for(next, first); });
  if (rule_.pending) {
    engine_.expire();
  }
  return any;
}

void BatchSizer::State::check_input(const StepInput& input) {
  if (input.error) {
    std::rethrow_exception(input.error);
  }
  TORCH_CHECK_VALUE(
      !input.by_length || !options_.lockstep,
      "a step by length cannot keep ranks in lockstep (lockstep: true); drop by_length");
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
        "split must be positive numbers of rows that add up to the batch (sum of split: ", sum,
        ", least: ",
        input.split->empty() ? 0 : *std::min_element(input.split->begin(), input.split->end()),
        ", rows: ", input.rows.value_or(0), "); pass Outcome.split of the same batch");
  }
  check_limit();
  if (!input.accumulate) {
    engine_.group().require_empty_gradients();
  }
}

void BatchSizer::State::check_limit() {
  const auto limit = memory::stats(options_.device).limit_bytes;
  const auto kept = engine_.group().kept().bytes();
  if (limit == checked_.limit && kept <= checked_.kept_bytes) {
    return;
  }
  if (limit && options_.required_bytes) {
    const auto required = options_.required_bytes() + kept;
    TORCH_CHECK_VALUE(
        *limit >= required,
        "the memory limit is below what parameters, gradients and optimizer state take (limit: ",
        format_bytes(*limit), ", needed before any sample: ", format_bytes(required),
        "); raise it or shard the model",
        options_.state_may_leave
            ? ", or keep the optimizer's state elsewhere (ladder=[..., \"state\"])"
            : "");
  }
  checked_.limit = limit;
  checked_.kept_bytes = kept;
}

void BatchSizer::State::capture(const StepInput& input, const PieceWork& work) {
  const bool repeats =
      input.rows && work.tensors &&
      (!splitting_.in_lockstep() || inner_collectives(engine_.group()) != InnerCollectives::none);
  engine_.before().capture(repeats ? work.tensors(0, *input.rows) : std::vector<NamedTensor>());
}

void BatchSizer::State::settle_rule(RuleVote& vote, const std::vector<ControlRecord>& said) {
  rule_.runs += vote.runs;
  rule_.ms += vote.ms;
  vote.settle(said);
  if (vote.chosen >= 0) {
    rule_.name = vote.names.at(vote.chosen);
  }
}

void BatchSizer::State::require_agreed_pieces(const StepInput& input) const {
  TORCH_CHECK_VALUE(!splitting_.in_lockstep() || !input.split ||
                        static_cast<int64_t>(input.split->size()) == engine_.agreed().pieces,
                    "in lockstep a split has as many pieces as the ranks agreed on (pieces of "
                    "split: ",
                    input.split ? input.split->size() : 0, ", agreed: ", engine_.agreed().pieces,
                    ")");
}

std::optional<Plan> BatchSizer::State::plan(const StepInput& input, const PieceWork& work) {
  const auto entered = engine_.enter("plan");
  TORCH_CHECK_VALUE(!splitting_.in_lockstep(),
                    "a plan runs a few rows, and no rank can do that alone where the model has "
                    "collectives of its own (ranks: ",
                    engine_.group().world_size(), "); let step find the pieces");
  const auto gradients_back = c10::make_scope_exit([&] { engine_.group().kept().give_back(); });
  if (input.accumulate) {
    engine_.group().keep_gradients();
  }
  check_input(input);
  TORCH_CHECK_VALUE(input.rows, "there is nothing to plan without a batch (rows: none)");
  const auto lets_go = c10::make_scope_exit([&] { engine_.before().release(); });
  capture(input, work);
  auto plan = forecaster_.plan_of(input, work, true);
  if (plan) {
    const auto of_optimizer = options_.optimizer_bytes ? options_.optimizer_bytes() : 0;
    plan->peak_bytes = std::max(plan->peak_bytes, plan->used_bytes + of_optimizer);
    if (plan->reserved_bytes) {
      plan->reserved_bytes = std::max(*plan->reserved_bytes, plan->peak_bytes);
    }
    if (plan->whole_bytes) {
      plan->whole_bytes = std::max(*plan->whole_bytes, plan->peak_bytes);
    }
    if (plan->split.empty()) {
      plan->pieces = std::ssize(splitting_.split_of(*input.rows, plan->pieces));
    }
    divide(*plan, options_.standing_bytes ? options_.standing_bytes() : StandingBytes{});
  }
  return plan;
}

std::map<std::string, double> BatchSizer::State::state() const {
  std::map<std::string, double> state{
      {"steps", static_cast<double>(engine_.steps())},
      {"piece_rows", static_cast<double>(splitting_.by_rows().piece_rows())},
      {"last_total", engine_.last_total()},
  };
  if (splitting_.by_rows().piece_rows() == 0 &&
      forecaster_.found().pieces > 1) {  // for a resumed job without forecasts
    state["piece_rows"] = static_cast<double>(
        split_rows(forecaster_.found().rows, forecaster_.found().pieces).front());
  }
  if (const auto tokens = splitting_.by_length().policy.piece_rows(); tokens > 0) {
    state["piece_tokens"] = static_cast<double>(tokens);
  }
  forecaster_.found().put(state);
  return state;
}

void BatchSizer::State::load_state(const std::map<std::string, double>& state) {
  const auto entered = engine_.enter("load_state");
  const auto get = [&](const char* name) {
    const auto found = state.find(name);
    TORCH_CHECK_VALUE(found != state.end(), "the sizer's state lacks an entry (name: ", name,
                      "); load what state_dict() of a BatchSizer returned");
    return found->second;
  };
  const double piece_rows = get("piece_rows");
  const double last_total = get("last_total");
  const double steps = get("steps");
  TORCH_CHECK_VALUE(piece_rows >= 0 && last_total >= 0 && steps >= 0,
                    "the sizer's state is not one that state_dict gave (piece_rows: ", piece_rows,
                    ", last_total: ", last_total, ", steps: ", steps, ")");
  forecaster_.set_found(FoundPieces::of(state));
  const auto tokens = state.find("piece_tokens");
  TORCH_CHECK_VALUE(tokens == state.end() || tokens->second >= 0,
                    "the sizer's state is not one that state_dict gave (piece_tokens: ",
                    tokens == state.end() ? 0 : tokens->second, ")");
  splitting_.by_rows().set_piece_rows(static_cast<int64_t>(piece_rows));
  splitting_.by_length().policy.set_piece_rows(
      tokens == state.end() ? 0 : static_cast<int64_t>(tokens->second));
  engine_.resume(static_cast<int64_t>(steps), last_total);
}

Report BatchSizer::State::report() const {
  auto report = engine_.recorder().report(splitting_.by_rows().piece_rows());
  report.rungs = ladder_.logged;
  report.loss_rule = rule_.name;
  report.trial_runs = rule_.runs;
  report.trial_ms = rule_.ms;
  return report;
}

}  // namespace brimful
