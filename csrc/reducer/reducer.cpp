#include <brimful/error.h>
#include <brimful/reducer/reducer.h>

#include <algorithm>

#include "reducer/agree.h"
#include "reducer/gather.h"
#include "reducer/reducer_state.h"

namespace brimful {

PlainLoop& Reducer::loop() {
  return s_->loop;
}
ParticipantAttempt& Reducer::attempt() {
  return s_->engine.step();
}
std::vector<ControlRecord> Reducer::exchange(const ControlRecord& record) {
  return exchange_records(s_->engine, record);
}
std::vector<at::Tensor> Reducer::gather(const at::Tensor& own) {
  return brimful::gather(s_->engine, own);
}
void Reducer::sum(at::Tensor& tensor) {
  brimful::sum(s_->engine, tensor);
}

int Reducer::rank() const {
  return s_->engine.link().rank;
}
int Reducer::world_size() const {
  return s_->engine.link().world_size;
}
int64_t Reducer::step() const {
  return s_->engine.attempt().step();
}
const FailureBoard& Reducer::board() const {
  return *s_->engine.link().board;
}
const std::vector<at::Tensor>& Reducer::parameters() const {
  return s_->engine.layout().parameters;
}
const std::vector<std::string>& Reducer::names() const {
  return s_->engine.layout().names;
}

bool Reducer::is_broken() const {
  return s_->engine.link().is_broken();
}

int64_t Reducer::launched() const {
  return s_->engine.step().progress().launched;
}
int64_t Reducer::buckets() const {
  return s_->engine.layout().last() + 1;
}
Reducer::Counters Reducer::counters() const {
  return s_->engine.link().counters();
}
std::vector<StepTimes> Reducer::times() const {
  auto& watch = s_->engine.watch();
  watch.take_late_times();
  return watch.steps();
}

std::string Reducer::plan() const {
  return to_json(s_->engine.layout().plan);
}
std::string Reducer::describe_plan() const {
  const auto& layout = s_->engine.layout();
  return to_string(layout.plan, layout.infos) + s_->engine.tuner().report();
}

bool Reducer::replace_buffer(const at::Tensor& before, const at::Tensor& now) {
  const bool alike = s_->engine.replace_buffer(before, now);
  for (auto& buffer : s_->buffers) {
    buffer = alike && buffer.is_same(before) ? now : buffer;
  }
  return alike;
}
void Reducer::broadcast(const std::vector<at::Tensor>& tensors, int source) {
  auto& link = s_->engine.link();
  try {
    broadcast_from(source, link.group, tensors);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& e) {
    link.fail(std::current_exception());
    link.throw_broken(step(), "a broadcast", e.what());
  }
}
std::vector<std::vector<uint8_t>> gather_bytes(Reducer& reducer, const std::vector<uint8_t>& own) {
  return gather_bytes(reducer.s_->engine, own, "an exchange");
}

void wait_for_sums(Reducer& reducer) {
  reducer.s_->engine.step().wait_for_sums();
}

void require_sums(Reducer& reducer) {
  reducer.s_->engine.step().require_sums();
}

void Reducer::register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                 const std::string& name) {
  auto& engine = s_->engine;
  const auto& wire_dtype = engine.layout().wire_dtype;
  TORCH_CHECK_VALUE(hook, "there is no hook to register (hook: null)");
  TORCH_CHECK_VALUE(!engine.hooks().is_set(),
                    "the reducer has a communication hook already (registered: true); register one "
                    "hook, and combine several in a function of your own");
  TORCH_CHECK_VALUE(!wire_dtype, "a hook decides itself how gradients travel (wire_dtype: ",
                    c10::toString(*wire_dtype), "); leave wire_dtype out");
  s_->loop.settle();
  const auto lock = engine.attempt().lock();
  TORCH_CHECK_VALUE(engine.attempt().is_idle(),
                    "a communication hook was registered within a step (in a step: true); register "
                    "it before the first step");
  s_->require_same_hook(name);
  s_->hook = name;
  engine.set_hook(std::move(hook));
}

/// Another hook, or none, would send other sizes: gloo kills a process for that.
void Reducer::State::require_same_hook(const std::string& name) const {
  const auto& link = engine.link();
  std::vector<uint8_t> own(name.begin(), name.end());
  own.resize(64);
  const auto all = exchange_bytes(link.group, link.device, own);
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& theirs) { return theirs != all[0]; });
  if (other != all.end()) {
    throw PlanMismatch("the ranks' communication hooks differ (rank 0: " +
                       std::string(all[0].begin(), std::find(all[0].begin(), all[0].end(), 0)) +
                       ", rank " + std::to_string(other - all.begin()) + ": " +
                       std::string(other->begin(), std::find(other->begin(), other->end(), 0)) +
                       "); register the same on every rank");
  }
}

}  // namespace brimful
