// A step of all stages: one attempt of it stands, or it fails with nothing left of it.
#include <ATen/ATen.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/thrown_by.h"
#include "pipeline/pipeline_step.h"
#include "step/no_capture.h"

namespace brimful::pipeline {
namespace {
/// None unless all are counted: what runs out unseen would be tried in every step.
std::vector<c10::Device> counted(const std::vector<c10::Device>& devices) {
  const auto each = distinct(devices);
  return std::all_of(each.begin(), each.end(), memory::is_counted) ? each
                                                                   : std::vector<c10::Device>();
}
}  // namespace

ControlRecord record_of(Next next, std::optional<int64_t> rows) {
  ControlRecord record;
  record.next = next;
  record.stop = stop_to_send();
  if (next == Next::no || rows) {
    record.next_weight = next == Next::no ? 0 : static_cast<double>(*rows);
  }
  return record;
}

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
          trains ? &engine->recorder() : nullptr};
}

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

void Pipeline::State::regrouped(int64_t progress) {
  engine->set_group(group_of_step());
  engine->regrouped();
  agreement.regrouped(progress);
}

void Pipeline::State::require_usable() const {
  const auto under_way = executor->abandoned();
  TORCH_CHECK(
      under_way.empty(),
      "this pipeline cannot be used any more: a call was interrupted, and a stage did not end (",
      under_way, "); make a new one");
}

/// What is around every call.
class Pipeline::State::InCall {
 public:
  InCall(State& pipeline, const char* call)
      : entered_(pipeline.engine->enter(call)), doing_(begin(pipeline)) {
    if (pipeline.options.peers) {
      lanes_watched_ = pipeline.options.peers->look_after();
    }
    pipeline.begin_call();
  }

 private:
  static Doing begin(State& pipeline) {
    pipeline.require_usable();
    return {pipeline.doing, pipeline.cancelled};
  }
  OneCall::Entered entered_;
  Doing doing_;
  std::jthread lanes_watched_;
};

void Pipeline::State::begin_call() {
  last_failure.reset();
  agreement.begin_call();
}

bool Pipeline::State::begin_loop(const ControlRecord& first) {
  const auto entered = engine->enter("begin_loop");
  engine->set_group(group_of_step());
  return engine->begin_loop([&] { return first; });
}

void Pipeline::State::announce_next(const ControlRecord& next) {
  const auto entered = engine->enter("announce_next");
  engine->announce_next(next);
}

Report Pipeline::State::report() const {
  auto report = engine->recorder().report(policies.training.piece_rows());
  report.rungs = last.rungs;
  return report;
}

Pipeline::Pipeline(std::vector<Stage> stages, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), std::move(options))) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;

Outcome Pipeline::step(int64_t rows, const PipelineWork& work) {
  auto& own = *state_;
  for (const auto device : own.options.devices) {
    require_no_capture(device, "a step of a pipeline");
  }
  const State::InCall in_call(own, "step");
  own.engine->set_group(own.group_of_step());
  State::PipelineStep step(own, rows, work, own.engine->group(), true);
  return own.engine->step(step);
}
Outcome Pipeline::step_without_data() {
  PipelineWork nothing;
  nothing.no_data = true;
  return step(0, nothing);
}
bool Pipeline::begin_loop(Next next, std::optional<int64_t> rows) {
  return state_->begin_loop(record_of(next, rows));
}
void Pipeline::announce_next(Next next, std::optional<int64_t> rows) {
  state_->announce_next(record_of(next, rows));
}
// The others wait in a step, for messages or for a bucket: it fails there, as any step of which this rank refuses its part.
void Pipeline::report_failure(const std::exception_ptr& error) {
  if (at_end() || (!state_->options.peers && state_->engine->group().world_size() == 1)) {
    return;
  }
  PipelineWork work;
  work.refused = error;
  if (const auto failed = thrown_by([&] { step(0, work); }); failed && failed != error) {
    log(LogLevel::warning, "could not announce this rank's failure: " + brimful::to_string(failed));
  }
}
bool Pipeline::at_end() const {
  return state_->engine->agreed().at_end;
}
bool Pipeline::expects_step() const {
  return state_->engine->agreed().holds && !at_end();
}
int64_t Pipeline::steps() const {
  return state_->engine->steps();
}
Value Pipeline::forward(int64_t rows, const PipelineWork& work) {
  auto& own = *state_;
  const State::InCall in_call(own, "forward");
  const at::NoGradGuard no_grad;
  const auto lets_go = c10::make_scope_exit([&] { own.engine->before().release(); });
  auto inference = work;
  inference.loss = nullptr;
  StepGroup alone({}, {});  // no gradient is this call's to undo
  return State::PipelineStep(own, rows, inference, alone, false).infer();
}
void Pipeline::cancel() {
  state_->cancelled.store(true, std::memory_order_release);
}
bool Pipeline::is_broken() const {
  return state_->agreement.is_broken();
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
