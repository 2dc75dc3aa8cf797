#include <brimful/error.h>
#include <brimful/reducer/reducer.h>

#include <algorithm>

#include "reducer/agree.h"
#include "reducer/reducer_state.h"

namespace brimful {

PlainLoop& Reducer::loop() {
  return s_->loop;
}
ParticipantAttempt& Reducer::attempt() {
  return s_->engine;
}
std::vector<ControlRecord> Reducer::exchange(const ControlRecord& record) {
  return exchange_records(s_->engine, record);
}
std::vector<at::Tensor> Reducer::gather(const at::Tensor& own) {
  return s_->engine.gather(own);
}
void Reducer::sum(at::Tensor& tensor) {
  s_->engine.sum(tensor);
}

int Reducer::rank() const {
  return s_->engine.state().link.rank;
}
int Reducer::world_size() const {
  return s_->engine.state().link.world_size;
}
int64_t Reducer::step() const {
  return s_->engine.state().attempt.step;
}
const FailureBoard& Reducer::board() const {
  return *s_->engine.state().link.board;
}
const std::vector<at::Tensor>& Reducer::parameters() const {
  return s_->engine.state().layout.parameters;
}
const std::vector<std::string>& Reducer::names() const {
  return s_->engine.state().layout.names;
}

bool Reducer::is_broken() const {
  return s_->engine.state().link.broken != nullptr;
}

int64_t Reducer::launched() const {
  return s_->engine.state().attempt.next;
}
int64_t Reducer::buckets() const {
  return s_->engine.state().layout.last() + 1;
}
Reducer::Counters Reducer::counters() const {
  return s_->engine.state().counters;
}
std::vector<StepTimes> Reducer::times() const {
  return s_->engine.state().watch.steps();
}

std::string Reducer::plan() const {
  return to_json(s_->engine.state().layout.plan);
}
std::string Reducer::describe_plan() const {
  const auto& state = s_->engine.state();
  return to_string(state.layout.plan, state.layout.infos) + state.tuner.report();
}

bool Reducer::replace_buffer(const at::Tensor& before, const at::Tensor& now) {
  const bool alike = s_->engine.state().layout.tail->replace(before, now);
  for (auto& buffer : s_->buffers) {
    buffer = alike && buffer.is_same(before) ? now : buffer;
  }
  return alike;
}
void Reducer::broadcast(const std::vector<at::Tensor>& tensors, int source) {
  auto& s = s_->engine.state();
  try {
    broadcast_from(source, s.link.group, tensors);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& e) {
    s.link.broken = std::current_exception();
    s.link.throw_broken(s.attempt.step, "a broadcast", e.what());
  }
}
std::vector<std::vector<uint8_t>> gather_bytes(Reducer& reducer, const std::vector<uint8_t>& own) {
  return reducer.s_->engine.gather_bytes(own, "an exchange");
}

void Reducer::register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                 const std::string& name) {
  auto& s = s_->engine.state();
  TORCH_CHECK_VALUE(hook, "there is no hook to register (hook: null)");
  TORCH_CHECK_VALUE(!s.hooks.is_set(),
                    "the reducer has a communication hook already (registered: true); register one "
                    "hook, and combine several in a function of your own");
  TORCH_CHECK_VALUE(!s.layout.wire_dtype,
                    "a hook decides itself how gradients travel (wire_dtype: ",
                    c10::toString(*s.layout.wire_dtype), "); leave wire_dtype out");
  s_->loop.settle();
  const std::lock_guard<std::mutex> lock(s.attempt.mutex);
  TORCH_CHECK_VALUE(s.attempt.mode == Mode::idle,
                    "a communication hook was registered within a step (in a step: true); register "
                    "it before the first step");
  s_->require_same_hook(name);
  s_->hook = name;
  s_->engine.set_hook(std::move(hook));
}

/// Another hook, or none, would send other sizes: gloo kills a process for that.
void Reducer::State::require_same_hook(const std::string& name) const {
  const auto& s = engine.state();
  std::vector<uint8_t> own(name.begin(), name.end());
  own.resize(64);
  const auto all = exchange_bytes(s.link.group, s.link.device, own);
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
