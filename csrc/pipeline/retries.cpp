// How many microbatches the attempts of a call have: begins with what fitted, and grows again when there is room.
#include <brimful/log.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>
#include <numeric>

#include "base/format.h"
#include "pipeline/peaks.h"
#include "pipeline/pipeline_state.h"

namespace brimful::pipeline {
namespace {
/// The last batch of an epoch may have fewer rows than microbatches. There are as many all the same, since what moves
/// between the ranks must not depend on rows that they may have been given unlike.
std::vector<int64_t> split_of(const Call& call) {
  auto split = split_rows(call.rows, call.filled());
  split.resize(call.microbatches());
  return split;
}

int64_t total_bytes(const std::vector<std::pair<c10::Device, int64_t>>& peaks) {
  return std::accumulate(peaks.begin(), peaks.end(), int64_t{0},
                         [](int64_t sum, const auto& peak) { return sum + peak.second; });
}

/// None unless all are counted: what runs out unseen would be tried in every step.
std::vector<c10::Device> counted(const std::vector<c10::Device>& devices) {
  const auto each = distinct(devices);
  return std::all_of(each.begin(), each.end(), is_counted) ? each : std::vector<c10::Device>();
}

/// `microbatches` times a power of two, `wanted` at least and `most` at most: not every number suits a schedule.
int64_t doubled(int64_t microbatches, int64_t wanted, int64_t most) {
  while (microbatches < wanted) {
    microbatches *= 2;
  }
  return std::min(microbatches, most);
}
}  // namespace

Pipeline::State::Policies::Policies(const std::vector<c10::Device>& devices)
    : training(counted(devices)), inference(counted(devices)) {}

int64_t Pipeline::State::first_microbatches(bool trains, int64_t rows) const {
  const bool all_have_rows = !trains && !options.fixed_schedule;
  return all_have_rows ? std::min(std::max<int64_t>(rows, 1), options.microbatches)
                       : options.microbatches;
}

Retry Pipeline::State::retry_of(bool trains, int64_t rows) {
  auto& policy = policies.of(trains);
  const auto first = first_microbatches(trains, rows);
  const auto known = options.fixed_schedule ? first : policy.known_pieces(rows, first);
  return {policy, rows, options.max_retries,
          ExecutionPlan::in_pieces(rows, std::max(first, known))};
}

void Pipeline::State::choose_microbatches(Call& call) {
  auto& policy = policies.of(call.trains);
  policy.measure();
  const auto first = first_microbatches(call.trains, call.rows);
  const auto known = call.microbatches();
  if (known > first) {
    const auto fits = std::min(policy.first(call.rows, first).pieces, known);
    call.retry.set_plan(ExecutionPlan::in_pieces(call.rows, doubled(first, fits, known)));
  }
}

c10::Device Pipeline::State::device_of(const ActionFailure& failure) const {
  return options.devices[options.peers ? 0 : failure.rank];
}

Ended Pipeline::State::ended_by(Call& call, const StepResult& result, const PeerVerdict& verdict) {
  const bool is_without = recomputing->drop_refused(call, result);
  std::string where = " on rank " + std::to_string(verdict.rank);
  Ended ended{Ended::How::as_it_was};
  if (result.failure && result.failure->index >= 0) {
    last_failure = result.failure;
    last_failure->error = nullptr;
    where = " in the " + pipeline::to_string(*result.failure);
  }
  if (verdict.refine) {
    ended.how = Ended::How::ran_out;
    ended.pieces = finer(call.rows, call.microbatches());  // alike on all ranks
    if (result.failure && result.failure->kind == Status::out_of_memory) {
      ended.device = device_of(*result.failure);
    }
    log(LogLevel::warning, "memory ran out" + where + ": the step is repeated with " +
                               std::to_string(ended.pieces) + " microbatches instead of " +
                               std::to_string(call.microbatches()));
  } else if (call.garbage_helped) {
    log(LogLevel::warning,
        "memory ran out" + where + ": " + format_bytes(call.garbage.take_freed_bytes()) +
            " of garbage in reference cycles is freed and the step repeated as it was");
  } else if (const auto stages = recomputing->add(call, result); !stages.empty()) {
    log(LogLevel::warning, "memory ran out" + where +
                               ", and microbatches are as small as they can be: the step is "
                               "repeated with " +
                               stages + " recomputed in backward");
  } else if (is_without) {
    // said already
  } else if (result.drew_together) {
    log(LogLevel::info,
        "the step is repeated as it was: its stages draw random numbers, and take turns from now");
  } else {
    log(LogLevel::info, "the step is repeated as it was: it failed" + where + " of replica " +
                            std::to_string(verdict.replica));
  }
  return ended;
}

Ended Pipeline::State::attempt(Call& call, PeerVerdict& verdict, StepResult& standing) {
  if (call.retry.retries() > 0 && options.peers && options.peers->wants_links()) {
    meet(call);
  }
  const Peaks peaks(options.devices);
  call.split = call.refused || call.failed_elsewhere ? std::vector<int64_t>(call.microbatches())
                                                     : split_of(call);
  StepResult result;
  try {
    result = run(call);
    if (!result.abandoned) {
      verdict = close(call, result);
    }
  } catch (...) {
    undo(call);
    throw;
  }
  if (result.abandoned) {
    give_up(call, result);
  }
  if (verdict.kind == Status::ok) {
    policies.of(call.trains).note_fit(call.retry.plan(), peaks.bytes());
    standing = std::move(result);
    return {};
  }
  undo(call);
  call.retry.note_tried(total_bytes(peaks.bytes()));
  if (is_failure(verdict.kind)) {
    raise(call, result, verdict);
  }
  refuse_if_thrown(call, [&] {
    if (call.lost) {
      std::rethrow_exception(call.lost);
    }
  });
  return ended_by(call, result, verdict);
}

StepResult Pipeline::State::run_until_it_stands(Call& call, PeerVerdict& verdict) {
  begin(call);
  StepResult standing;
  call.retry.run([&] { return attempt(call, verdict, standing); });
  return standing;
}

}  // namespace brimful::pipeline
