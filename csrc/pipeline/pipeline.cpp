// A step of all stages: one attempt of it stands, or it fails with nothing left of it.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/thrown_by.h"
#include "pipeline/failure.h"
#include "pipeline/peaks.h"
#include "pipeline/pipeline_state.h"
#include "pipeline/report.h"
#include "step/kept_gradients.h"
#include "step/no_capture.h"

namespace brimful::pipeline {
namespace {
void require_work(const PipelineWork& work) {
  if (work.refused) {
    std::rethrow_exception(work.refused);
  }
}

void require_rows(int64_t rows) {
  TORCH_CHECK_VALUE(rows > 0, "the batch is empty (rows: 0)");
}

/// Of the device whose peak a report has.
std::optional<int64_t> limit_of(const Peaks& peaks) {
  const auto device = fullest(peaks.bytes());
  return device ? memory::stats(device->first).limit_bytes : std::nullopt;
}

/// Without the microbatches that had no rows.
void drop_empty(const Call& call, Schedule& order, StepResult& result) {
  const auto is_empty = [&](const Action& action) { return action.microbatch >= call.filled(); };
  order.microbatches = static_cast<int>(call.filled());
  for (auto& actions : order.ranks) {
    std::erase_if(actions, is_empty);
  }
  for (auto& times : result.times) {
    std::erase_if(times, [&](const ActionTime& time) { return is_empty(time.action); });
  }
}

}  // namespace

bool Pipeline::State::may_split() const {
  return std::all_of(norms.begin(), norms.end(),
                     [](const auto& n) { return n->norms.may_split(); });
}

StepGroup Pipeline::State::group_of_step() const {
  const auto participants = replicas->participants();
  std::unordered_set<const c10::TensorImpl*> reduced;
  for (const auto& participant : participants) {
    for (const auto& parameter : participant->parameters()) {
      reduced.insert(parameter.unsafeGetTensorImpl());
    }
  }
  auto outside = trained_of(executor->stages());  // some may have been frozen, or unfrozen
  std::erase_if(outside, [&](const auto& p) { return reduced.count(p.unsafeGetTensorImpl()) > 0; });
  return {participants, std::move(outside)};
}

void Pipeline::State::stand(Call& call, StepResult result, const PeerVerdict& verdict,
                            Outcome& outcome) {
  const memory::Unlimited unlimited;
  outcome.weight = verdict.weight;
  outcome.loss = verdict.loss_sum / outcome.weight;
  outcome.pieces = call.filled();
  outcome.split.assign(call.split.begin(), call.split.begin() + call.filled());
  outcome.retries = call.retry.retries();
  outcome.attempts = call.retry.take_attempts();
  outcome.rungs = last.rungs = outcome.attempts.back().rungs;
  outcome.stop = learn_stop(verdict.stop);
  outcome.regroup = verdict.regroup;
  outcome.total_ms = static_cast<double>(result.end_ns - result.begin_ns) / 1e6;
  last_total_ = outcome.weight;
  last.result = std::move(result);
  last.schedule = call.order;
  if (call.filled() < call.microbatches()) {
    drop_empty(call, last.schedule, last.result);
  }
  recomputing->note_stood();
  last.notes = notes_of(*executor, last.schedule, last.result);
  recomputing->mark(last.notes);
  outcome.stages = last.notes;
}

void Pipeline::State::capture(Call& call) {
  transaction.capture();
  call.captured = true;
}

// In the first call it is not known yet what stages change.
void Pipeline::State::keep(const PipelineWork& work) {
  const bool first = !std::exchange(has_stepped_, true);
  batch.begin(work.reused, first ? KeptBatch::Copies::all : KeptBatch::Copies::known);
}

void Pipeline::State::undo(Call& call) {
  tied.drop_room();
  try {  // what failed the call is reported first
    call.group.discard();
    if (call.captured) {
      transaction.restore();
      batch.restore();
    }
  } catch (const std::exception&) {
    call.lost = std::current_exception();
  }
}

Shortfall Pipeline::State::shortfall_of(const Call& call, const ActionFailure& failure) const {
  const memory::Unlimited unlimited;
  const auto device = device_of(failure);
  auto shortfall = shortfall_on(device, [&] {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> buffers;
    for (const auto& stage : executor->stages()) {
      parameters.insert(parameters.end(), stage.parameters.begin(), stage.parameters.end());
      buffers.insert(buffers.end(), stage.buffers.begin(), stage.buffers.end());
    }
    return standing_bytes(parameters, buffers, device);
  });
  shortfall.of = Shortfall::Of::stages;
  shortfall.trains = call.trains;
  shortfall.rank = failure.rank;
  shortfall.world_size =
      options.peers ? options.peers->size() : static_cast<int>(std::ssize(options.devices));
  shortfall.rows = call.rows;
  shortfall.max_retries = options.max_retries;
  shortfall.may_split = agreed_.may_split;
  shortfall.is_fixed = options.fixed_schedule.has_value();
  shortfall.where = pipeline::to_string(failure);
  shortfall.on_stage =
      advice_on(failure.action.stage,
                {.schedule = call.order,
                 .trains = call.trains,
                 .is_fixed = shortfall.is_fixed,
                 .waits_for_retries = (options.recompute || options.offload) && call.trains &&
                                      options.max_retries == 0 && call.retry.plan().piece_rows <= 1,
                 .rung = recomputing->of(failure.action.stage)});
  shortfall.attempts = call.retry.attempts();
  shortfall.last_error = failure.text;
  return shortfall;
}

void Pipeline::State::raise(Call& call, StepResult& result, const PeerVerdict& verdict) {
  const bool memory = verdict.kind == Status::out_of_memory;
  if (call.refused) {
    std::rethrow_exception(call.refused);
  }
  if (verdict.rank < 0) {
    TORCH_CHECK_VALUE(false, verdict.text);
  }
  if (result.failure && result.failure->kind == verdict.kind) {
    if (result.failure->index >= 0) {
      last_failure = result.failure;
      last_failure->error = nullptr;  // pins what its frames hold
    }
    if (!memory) {
      rethrow(std::move(*result.failure));
    }
    if (own_verdict(call, result).kind == verdict.kind) {
      throw too_large(shortfall_of(call, *result.failure));
    }
  }
  const auto where =
      "rank " + std::to_string(verdict.rank) +
      (call.group.world_size() > 1 ? " of replica " + std::to_string(verdict.replica) : "");
  brimful::detail::throw_rank_failed(
      verdict.rank, -1, verdict.kind,
      memory ? "the pipeline's step ran out of memory on " + where +
                   (options.fixed_schedule ? " under a fixed schedule: "
                                           : " with any number of microbatches: ") +
                   verdict.text
             : "the pipeline's step failed on " + where + ": " + verdict.text);
}

void Pipeline::State::give_up(Call& call, const StepResult& result) {
  StepGroup(replicas->participants(), {}).abandon(Status::error, result.failure->text);
  undo(call);
  std::rethrow_exception(result.failure->error);
}

void Pipeline::State::regrouped(int64_t progress) {
  agreed_.progress = progress;
  last_total_ = 0;  // others may have made another last step
  agreed_.made = false;
  agreed_.broken = false;
}

void Pipeline::State::require_usable() const {
  const auto under_way = executor->abandoned();
  TORCH_CHECK(
      under_way.empty(),
      "this pipeline cannot be used any more: a call was interrupted, and a stage did not end (",
      under_way, "); make a new one");
}

Outcome Pipeline::State::step(int64_t rows, const PipelineWork& work) {
  for (const auto device : options.devices) {
    require_no_capture(device, "a step of a pipeline");
  }
  const OneCall::Entered entered(calls, "step");
  require_usable();
  const Doing in_call(doing, cancelled);
  const auto lanes_watched = options.peers ? options.peers->look_after() : std::jthread();
  last_failure.reset();
  agreed_.broken = false;
  const Peaks peaks(options.devices);
  bool stood = false;
  const auto noted =
      c10::make_scope_exit([&] { thrown_by([&] { recorder.end_step(stood, limit_of(peaks)); }); });
  Call call{rows, work, group_of_step(), retry_of(true, rows)};
  KeptGradients kept;
  const auto gradients_back = c10::make_scope_exit([&] { kept.give_back(); });
  const auto lets_go = c10::make_scope_exit([&] { batch.end(); });
  refuse_if_thrown(call, [&] {
    kept.take(trained_of(executor->stages()));  // first: what is refused is undone as a step is
    choose_microbatches(call);
    capture(call);
    keep(work);
    require_work(work);
    TORCH_CHECK_VALUE(work.loss, "a step needs a loss function (loss_fn: none)");
    require_rows(rows);
    for (const auto& each : norms) {
      each->norms.require_whole(call.filled());
    }
  });
  PeerVerdict verdict;
  auto result = run_until_it_stands(call, verdict);
  settle(call, verdict, result);
  kept.add();
  Outcome outcome;
  stand(call, std::move(result), verdict, outcome);
  outcome.peaks = peaks.bytes();
  if (const auto most = fullest(outcome.peaks)) {
    outcome.peak_bytes = most->second;
  }
  ++steps_;
  stood = true;
  return outcome;
}

Value Pipeline::State::forward(int64_t rows, const PipelineWork& work) {
  const OneCall::Entered entered(calls, "forward");
  require_usable();
  const Doing in_call(doing, cancelled);
  const auto lanes_watched = options.peers ? options.peers->look_after() : std::jthread();
  const at::NoGradGuard no_grad;
  const auto lets_go = c10::make_scope_exit([&] { batch.end(); });
  last_failure.reset();
  agreed_.broken = false;
  auto inference = work;
  inference.loss = nullptr;
  // No gradient is this call's to undo.
  Call call{rows, inference, StepGroup({}, {}), retry_of(false, rows), false};
  refuse_if_thrown(call, [&] {
    choose_microbatches(call);
    require_work(work);
    require_rows(rows);
    capture(call);
    keep(work);
  });
  PeerVerdict verdict;
  auto outputs = run_until_it_stands(call, verdict).outputs;
  outputs.resize(call.filled());
  return joined(outputs);
}

Report Pipeline::State::report() const {
  auto report = recorder.report(policies.training.piece_rows());
  report.rungs = last.rungs;
  return report;
}

Pipeline::Pipeline(std::vector<Stage> stages, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), std::move(options))) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;

Outcome Pipeline::step(int64_t rows, const PipelineWork& work) {
  return state_->step(rows, work);
}
Value Pipeline::forward(int64_t rows, const PipelineWork& work) {
  return state_->forward(rows, work);
}
void Pipeline::cancel() {
  state_->cancelled.store(true, std::memory_order_release);
}
bool Pipeline::is_broken() const {
  return state_->is_broken();
}
void Pipeline::regrouped(int64_t progress) {
  state_->regrouped(progress);
}
bool Pipeline::is_usable() const {
  return state_->executor->abandoned().empty();
}
Schedule Pipeline::schedule(int64_t microbatches) const {
  return state_->schedule(microbatches, true);
}
const std::vector<Stage>& Pipeline::stages() const {
  return state_->executor->stages();
}
const std::vector<c10::Device>& Pipeline::devices() const {
  return state_->options.devices;
}
int64_t Pipeline::microbatches() const {
  return state_->options.microbatches;
}
const std::optional<ActionFailure>& Pipeline::last_failure() const {
  return state_->last_failure;
}
Report Pipeline::report() const {
  return state_->report();
}
std::string Pipeline::trace() const {
  return state_->last.has_times() ? trace_json(state_->last.schedule, state_->last.result) : "";
}
std::string Pipeline::trace_svg() const {
  return state_->last.has_times() ? pipeline::trace_svg(state_->last.schedule, state_->last.result)
                                  : "";
}
std::string Pipeline::to_string() const {
  const auto now = progress();
  if (now.doing != kIdle) {  // the last step's notes are the call's that is under way
    return pipeline::to_string(*state_->executor, Schedule(), {}) +
           "\n  now: " + pipeline::to_string(now);
  }
  return pipeline::to_string(*state_->executor, state_->last.schedule, state_->last.notes);
}

}  // namespace brimful::pipeline
