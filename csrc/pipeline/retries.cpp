// How many microbatches the attempts of a call have: begins with what fitted, and grows again when there is room.
#include <brimful/log.h>
#include <brimful/step/pieces.h>

#include <algorithm>

#include "pipeline/peaks.h"
#include "pipeline/pipeline_state.h"
#include "step/repetition.h"

namespace brimful::pipeline {
namespace {
/// The last batch of an epoch may have fewer rows than microbatches. There are as many all the same, since what moves
/// between the ranks must not depend on rows that they may have been given unlike.
std::vector<int64_t> split_of(const Call& call) {
  auto split = split_rows(call.rows, call.filled());
  split.resize(call.microbatches());
  return split;
}

/// Of the device that ran out of memory, else of the fullest.
int64_t peak_of(const RetryPolicy::Bytes& peaks, std::optional<c10::Device> ran_out) {
  const auto own = std::find_if(peaks.begin(), peaks.end(),
                                [&](const auto& peak) { return peak.first == ran_out; });
  const auto found = own != peaks.end() ? std::optional(*own) : fullest(peaks);
  return found ? found->second : 0;
}

/// None unless all are counted: what runs out unseen would be tried in every step.
std::vector<c10::Device> counted(const std::vector<c10::Device>& devices) {
  const auto each = distinct(devices);
  return std::all_of(each.begin(), each.end(), memory::is_counted) ? each
                                                                   : std::vector<c10::Device>();
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
  return {policy, rows, options.max_retries, ExecutionPlan::in_pieces(rows, std::max(first, known)),
          trains ? &recorder : nullptr};
}

void Pipeline::State::choose_microbatches(Call& call) {
  auto& policy = policies.of(call.trains);
  policy.measure();
  recomputing->come_back(call.trains);
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

std::string Pipeline::State::name_of(const Call& call) const {
  return call.trains ? "step " + std::to_string(steps_) : "inference";
}

Ended Pipeline::State::ended_by(Call& call, const StepResult& result, const PeerVerdict& verdict) {
  const bool is_without = recomputing->drop_refused(result);
  Repetition again{.rank = verdict.rank,
                   .what = name_of(call),
                   .rows = call.rows,
                   .pieces = call.microbatches(),
                   .unit = "microbatches"};
  Ended ended{Ended::How::as_it_was};
  if (result.failure && result.failure->index >= 0) {
    last_failure = result.failure;
    last_failure->error = nullptr;
    again.where = pipeline::to_string(*result.failure);
  }
  const auto& failed = call.retry.attempts().back();
  if (verdict.refine) {
    ended.how = Ended::How::ran_out;
    ended.pieces = again.more = finer(call.rows, call.microbatches());  // alike on all ranks
    if (result.failure && result.failure->kind == Status::out_of_memory) {
      ended.device = device_of(*result.failure);
    }
    log_repetition(again, failed);
  } else if (call.as_it_was) {
    again.as_it_was = true;
    log_repetition(again, failed);
  } else if (const auto stages = recomputing->add(call, result); !stages.empty()) {
    again.reason =
        "memory ran out, and microbatches are as small as they can be; the step is repeated with " +
        stages;
    log_repetition(again, failed);
  } else if (is_without) {
    // said already
  } else if (result.drew_together) {
    log(LogLevel::info, again.what +
                            " is repeated as it was: its stages draw random numbers, and take "
                            "turns from now");
  } else {
    log(LogLevel::info, again.what + " is repeated for rank " + std::to_string(verdict.rank) +
                            " of replica " + std::to_string(verdict.replica));
  }
  return ended;
}

AttemptNote Pipeline::State::note_of(const Call& call, const StepResult& result,
                                     const PeerVerdict& verdict,
                                     const RetryPolicy::Bytes& peaks) const {
  const bool ran_out = result.failure && result.failure->kind == Status::out_of_memory;
  AttemptNote note;
  note.pieces = call.microbatches();
  note.piece_rows = call.retry.plan().piece_rows;
  note.peak_bytes =
      peak_of(peaks, ran_out ? std::optional(device_of(*result.failure)) : std::nullopt);
  if (ran_out || verdict.refine) {
    note.ran_out = {verdict.rank};
  }
  note.rungs = recomputing->named();
  return note;
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
  call.retry.note(note_of(call, result, verdict, peaks.bytes()),
                  result.failure && result.failure->kind == Status::out_of_memory);
  if (verdict.kind == Status::ok) {
    policies.of(call.trains).note_fit(call.retry.plan(), peaks.bytes());
    standing = std::move(result);
    return {};
  }
  undo(call);
  if (is_failure(verdict.kind)) {
    raise(call, result, verdict);
  }
  call.retry.remedy();
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
