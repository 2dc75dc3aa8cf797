#include "sizer/splitting.h"

#include <brimful/step/pieces.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace brimful {
namespace {
/// Of a piece that has these, with its padding if it has any.
int64_t most_tokens_of(const RowLengths& rows, const std::vector<int64_t>& split) {
  return rows.packed ? largest_packed_tokens(rows.lengths, split)
                     : largest_tokens(rows.lengths, split);
}
}  // namespace

Splitting::Splitting(const BatchSizerOptions& options, const StepGroup& group)
    : options_(options),
      group_(group),
      by_rows_({options.device}, options.piece_rows.value_or(0)),
      by_length_(options.device) {}

int64_t Splitting::most_pieces(int64_t rows) const {
  return std::max<int64_t>(rows / least_rows_, 1);
}

int64_t Splitting::wanted_pieces(const StepInput& input) const {
  if (!input.rows) {
    return 1;
  }
  if (input.split) {
    return static_cast<int64_t>(input.split->size());
  }
  return by_rows_.known_pieces(*input.rows, std::min(options_.pieces, *input.rows));
}

const std::vector<int64_t>* Splitting::given(const StepInput& input,
                                             const std::optional<Plan>& plan) {
  return input.split ? &*input.split : plan && !plan->split.empty() ? &plan->split : nullptr;
}

int64_t Splitting::units_of(const StepInput& input) {
  const auto rows = input.rows.value_or(0);
  return input.by_length && rows > 0 ? most_tokens_of(*input.by_length, {rows}) : rows;
}

ExecutionPlan Splitting::plan_as_run(const StepInput& input, const std::vector<int64_t>& split,
                                     Rungs rungs) {
  const auto most =
      input.by_length ? most_tokens_of(*input.by_length, split) : largest_piece(split);
  return {std::ssize(split), most, std::move(rungs)};
}

std::vector<int64_t> Splitting::split_within(const StepInput& input, int64_t tokens,
                                             const std::vector<int64_t>* given) const {
  const auto& rows = *input.by_length;
  if (given != nullptr && most_tokens_of(rows, *given) <= tokens) {
    return *given;
  }
  return split_by_length(input, rows.packed ? within_packed_tokens(rows.lengths, tokens)
                                            : within_tokens(rows.lengths, tokens));
}

std::vector<int64_t> Splitting::split_by_length(const StepInput& input,
                                                const MostRows& most_rows) const {
  if (input.by_length->packed) {
    return largest_pieces(input.by_length->lengths, most_rows);
  }
  const auto cost = by_length_.times.cost();
  const auto& lengths = input.by_length->lengths;
  return options_.equal_pieces ? split_of_few_shapes(lengths, most_rows, cost)
                               : fastest_split(lengths, most_rows, cost);
}

ExecutionPlan Splitting::first_plan(const StepInput& input, int64_t pieces,
                                    const std::vector<int64_t>* given) {
  if (!input.by_length || !input.rows) {
    return ExecutionPlan::in_pieces(input.rows.value_or(0), pieces);
  }
  if (given != nullptr) {
    return plan_as_run(input, *given);
  }
  if (policy_of(input).piece_rows() == 0 && options_.piece_rows) {
    policy_of(input).set_piece_rows(*options_.piece_rows * input.by_length->lengths.front());
  }
  auto plan = policy_of(input).first(units_of(input), options_.pieces);
  plan.pieces = std::ssize(split_by(plan, input, nullptr));
  return plan;
}

std::vector<int64_t> Splitting::split_of(int64_t rows, int64_t pieces) {
  return options_.equal_pieces && !in_lockstep()
             ? split_into_few_sizes(rows, split_rows(rows, pieces).front(), equal_sizes_)
             : split_rows(rows, pieces);
}

std::vector<int64_t> Splitting::split_by(const ExecutionPlan& plan, const StepInput& input,
                                         const std::vector<int64_t>* given) {
  if (input.by_length) {
    return split_within(input, plan.piece_rows, given);
  }
  if (input.split && plan.pieces == std::ssize(*input.split)) {
    return *input.split;
  }
  if (!input.rows && !in_lockstep()) {
    return {};
  }
  const auto rows = input.rows.value_or(0);
  return split_of(rows, in_lockstep() ? plan.pieces : std::min(plan.pieces, most_pieces(rows)));
}

bool Splitting::is_finest(const StepInput& input, int64_t pieces) const {
  const auto rows = input.rows.value_or(0);
  return input.whole || pieces >= std::min(rows, most_pieces(rows));
}

}  // namespace brimful
