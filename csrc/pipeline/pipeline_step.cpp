// A call of a pipeline, from its checks to its end: with how many microbatches its attempts run, and what becomes of them.
#include "pipeline/pipeline_step.h"

#include <ATen/ATen.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/pieces.h>

#include <algorithm>

#include "base/thrown_by.h"
#include "memory/host_tensor.h"
#include "pipeline/settle.h"
#include "sizer/loss_scale.h"
#include "step/agreement.h"
#include "step/kept_gradients.h"
#include "step/repetition.h"

namespace brimful::pipeline {
namespace {
/// The last batch of an epoch may have fewer rows than microbatches. There are as many all the same, since what moves
/// between the ranks must not depend on rows that they may have been given unlike.
std::vector<int64_t> split_of(const Call& call) {
  auto split = call.rows > 0 ? split_rows(call.rows, call.filled()) : std::vector<int64_t>();
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

/// `microbatches` times a power of two, `wanted` at least and `most` at most: not every number suits a schedule.
int64_t doubled(int64_t microbatches, int64_t wanted, int64_t most) {
  while (microbatches < wanted) {
    microbatches *= 2;
  }
  return std::min(microbatches, most);
}
}  // namespace

Pipeline::State::PipelineStep::PipelineStep(State& pipeline, int64_t rows, const PipelineWork& work,
                                            StepGroup& group, bool trains)
    : p_(pipeline),
      peaks_(pipeline.options.devices),
      call_{rows, work, group, pipeline.retry_of(trains, rows), trains} {}

std::string Pipeline::State::PipelineStep::name() const {
  return call_.trains ? p_.engine->name() : "inference";
}

std::optional<int64_t> Pipeline::State::PipelineStep::limit_bytes() const {
  const auto device = fullest(peaks_.bytes());
  return device ? memory::stats(device->first).limit_bytes : std::nullopt;
}

bool Pipeline::State::PipelineStep::carries(const std::exception_ptr& failed) {
  if (!p_.options.peers && call_.group.world_size() == 1) {
    return false;
  }
  call_.refused = call_.refused ? call_.refused : failed;
  return true;
}

void Pipeline::State::PipelineStep::prepare() {
  choose_microbatches();
  // In the first call it is not known yet what stages change.
  const bool first = !std::exchange(p_.has_stepped, true);
  p_.engine->before().capture(call_.work.reused,
                              first ? KeptBatch::Copies::all : KeptBatch::Copies::known);
  if (call_.work.refused) {
    std::rethrow_exception(call_.work.refused);
  }
  if (call_.work.no_data) {
    return;
  }
  TORCH_CHECK_VALUE(!call_.trains || call_.work.loss,
                    "a step needs a loss function (loss_fn: none)");
  TORCH_CHECK_VALUE(call_.rows > 0,
                    "the batch is empty (rows: 0); pass NO_DATA where this replica has none");
  for (const auto& each : p_.norms) {
    if (call_.trains) {
      each->norms.require_whole(call_.filled());
    }
  }
}

ControlRecord Pipeline::State::PipelineStep::first_record() const {
  return call_.refused ? ControlRecord()
                       : record_of(call_.work.no_data ? Next::no : Next::yes, call_.rows);
}

// By an exchange, or the total of the last step; where ranks have another one, gradients are scaled in the end.
void Pipeline::State::PipelineStep::begin() {
  call_.ref = call_.group.world_size() > 1 ? p_.engine->agreed().ref()
                                           : static_cast<double>(std::max<int64_t>(call_.rows, 1));
  std::optional<memory::ValuesOnHost> scale;
  auto* const scaler = p_.options.scaler;
  if (scaler != nullptr && scaler->enabled() && call_.group.world_size() > 1) {
    scale.emplace(scaler->tensors(p_.options.devices[0]).first);
  }
  call_.mark = mark_of(call_.ref, scale ? *scale->get().const_data_ptr<float>() : 1, false);
}

Outcome Pipeline::State::PipelineStep::run() {
  until_it_stands();
  // First: the other replicas do not learn what fails from here on.
  records_.at(call_.group.rank()).stop = verdict_.stop;  // of other stages' replicas too
  p_.engine->adopt(records_);
  p_.engine->note_end(records_);
  p_.engine->note_total(verdict_.weight);
  p_.doing = "the step stands: the ranks exchange what their gradients have in common";
  const auto failed = thrown_by([&] {
    Settlement(p_.options, p_.agreement, p_.tied, p_.executor->stages())
        .run(call_, verdict_, standing_);
  });
  if (failed) {
    undo();
    std::rethrow_exception(failed);
  }
  call_.group.kept().add();
  return stand();
}

Value Pipeline::State::PipelineStep::infer() {
  const auto failed = thrown_by([&] { prepare(); });
  if (failed && !carries(failed)) {
    std::rethrow_exception(failed);
  }
  begin();
  until_it_stands();
  auto outputs = std::move(standing_.outputs);
  outputs.resize(call_.filled());
  return joined(outputs);
}

void Pipeline::State::PipelineStep::choose_microbatches() {
  auto& policy = p_.policies.of(call_.trains);
  policy.measure();
  p_.recomputing->come_back(call_.trains);
  const auto first = p_.first_microbatches(call_.trains, call_.rows);
  const auto known = call_.microbatches();
  if (known > first) {
    const auto fits = std::min(policy.first(call_.rows, first).pieces, known);
    call_.retry.set_plan(ExecutionPlan::in_pieces(call_.rows, doubled(first, fits, known)));
  }
}

void Pipeline::State::PipelineStep::until_it_stands() {
  p_.doing = "a call begins: the ranks compare what they were given";
  // Later steps have as many microbatches as the first one on all ranks, until memory runs out: then they depend on the
  // rows, and on the memory of each rank. Those of inference depend on the rows, for a batch may have fewer.
  if (p_.agreement.is_due() ||
      (p_.options.peers && (p_.policies.of(call_.trains).piece_rows() > 0 || !call_.trains))) {
    meet();
  }
  for (bool stands = false; !stands;) {
    call_.retry.begin_attempt();
    if (call_.retry.retries() > 0 && p_.options.peers && p_.options.peers->wants_links()) {
      meet();
    }
    const Peaks peaks(p_.options.devices);
    call_.split = call_.refused || call_.failed_elsewhere
                      ? std::vector<int64_t>(call_.microbatches())
                      : split_of(call_);
    StepResult result;
    const auto broke = thrown_by([&] {
      result = run_schedule();
      if (!result.abandoned) {
        verdict_ = close(result);
      }
    });
    if (broke) {
      undo();
      std::rethrow_exception(broke);
    }
    if (result.abandoned) {
      give_up(result);
    }
    stands = call_.retry.end_attempt(settle(result, peaks.bytes()));
  }
}

Ended Pipeline::State::PipelineStep::settle(StepResult& result, const RetryPolicy::Bytes& peaks) {
  call_.retry.note(note_of(result, peaks),
                   result.failure && result.failure->kind == Status::out_of_memory);
  if (verdict_.kind == Status::ok) {
    if (call_.rows > 0) {
      p_.policies.of(call_.trains).note_fit(call_.retry.plan(), peaks);
    }
    standing_ = std::move(result);
    return {};
  }
  undo();
  if (is_failure(verdict_.kind)) {
    raise(result);
  }
  call_.retry.remedy();
  if (call_.lost && !carries(call_.lost)) {
    std::rethrow_exception(call_.lost);
  }
  return ended_by(result);
}

Ended Pipeline::State::PipelineStep::ended_by(const StepResult& result) {
  const bool is_without = p_.recomputing->drop_refused(result);
  Repetition again{.rank = verdict_.rank,
                   .what = name(),
                   .rows = call_.rows,
                   .pieces = call_.microbatches(),
                   .unit = "microbatches"};
  Ended ended{Ended::How::as_it_was};
  if (result.failure && result.failure->index >= 0) {
    p_.last_failure = result.failure;
    p_.last_failure->error = nullptr;
    again.where = pipeline::to_string(*result.failure);
  }
  const auto& failed = call_.retry.attempts().back();
  if (verdict_.refine) {
    ended.how = Ended::How::ran_out;
    ended.pieces = again.more = finer(call_.rows, call_.microbatches());  // alike on all ranks
    if (result.failure && result.failure->kind == Status::out_of_memory) {
      ended.device = device_of(*result.failure);
    }
    log_repetition(again, failed);
  } else if (call_.as_it_was) {
    again.as_it_was = true;
    log_repetition(again, failed);
  } else if (const auto stages = p_.recomputing->add(call_, result); !stages.empty()) {
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
    log(LogLevel::info, again.what + " is repeated for rank " + std::to_string(verdict_.rank) +
                            " of replica " + std::to_string(verdict_.replica));
  }
  return ended;
}

AttemptNote Pipeline::State::PipelineStep::note_of(const StepResult& result,
                                                   const RetryPolicy::Bytes& peaks) const {
  const bool ran_out = result.failure && result.failure->kind == Status::out_of_memory;
  AttemptNote note;
  note.pieces = call_.microbatches();
  note.piece_rows = call_.retry.plan().piece_rows;
  note.peak_bytes =
      peak_of(peaks, ran_out ? std::optional(device_of(*result.failure)) : std::nullopt);
  if (ran_out || verdict_.refine) {
    note.ran_out = {verdict_.rank};
  }
  note.rungs = p_.recomputing->named();
  return note;
}

void Pipeline::State::PipelineStep::undo() {
  p_.tied.drop_room();
  // What failed the call is reported first.
  const auto failed = thrown_by([&] {
    call_.group.discard();
    p_.engine->before().restore();
  });
  call_.lost = failed ? failed : call_.lost;
}

namespace {
/// Late, unless peers have exchanged it.
LateNumber loss_of(const StepGroup& group, const PeerVerdict& verdict) {
  const auto& late = group.late_sums();
  return late ? LateNumber(late, &LateSums::mean_loss)
              : LateNumber(verdict.loss_sum / verdict.weight);
}
}  // namespace

Outcome Pipeline::State::PipelineStep::stand() {
  const memory::Unlimited unlimited;
  Outcome outcome;
  outcome.weight = verdict_.weight;
  outcome.loss = loss_of(call_.group, verdict_);
  outcome.pieces = call_.filled();
  outcome.split.assign(call_.split.begin(), call_.split.begin() + call_.filled());
  outcome.retries = call_.retry.retries();
  outcome.attempts = call_.retry.take_attempts();
  outcome.rungs = p_.last.rungs = outcome.attempts.back().rungs;
  outcome.stop = learn_stop(verdict_.stop);
  outcome.regroup = verdict_.regroup;
  outcome.total_ms = static_cast<double>(standing_.end_ns - standing_.begin_ns) / 1e6;
  outcome.peaks = peaks_.bytes();
  outcome.peak_bytes = peak_of(outcome.peaks, std::nullopt);
  outcome.last = p_.engine->agreed().at_end;
  if (call_.rows > 0) {
    p_.recomputing->note_stood();
    p_.last.take(*p_.executor, call_.order, call_.filled(), std::move(standing_));
    p_.recomputing->mark(p_.last.notes);
    outcome.stages = p_.last.notes;
  }
  return outcome;
}

}  // namespace brimful::pipeline
