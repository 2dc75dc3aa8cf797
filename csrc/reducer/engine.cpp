// How a backward begins and its gradients come.
#include "reducer/engine.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "base/fnv.h"
#include "reducer/graph_hooks.h"

namespace brimful {

void Engine::attach(std::weak_ptr<Engine> self, EngineDriver& driver) {
  self_ = std::move(self);
  driver_ = &driver;
  for (size_t i = 0; i < s_.layout.parameters.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(s_.layout.parameters[i]);
    auto hook = [weak = self_, i](const torch::autograd::variable_list& gradients) {
      if (const auto engine = weak.lock()) {
        engine->on_gradient(static_cast<int64_t>(i), gradients[0]);
      }
    };
    hook_keys_.push_back(accumulator->add_post_hook(after_node(std::move(hook))));
    s_.accumulators.push_back(std::move(accumulator));
  }
}

void Engine::remove_hooks() {
  for (size_t i = 0; i < hook_keys_.size(); ++i) {
    s_.accumulators[i]->del_post_hook(hook_keys_[i]);
  }
  hook_keys_.clear();
}

void Engine::on_gradient(int64_t parameter, const at::Tensor& gradient) {
  std::unique_lock<std::mutex> lock(s_.attempt.mutex);
  if (s_.attempt.mode == Mode::idle && !driver_->begin_backward(lock)) {
    return;
  }
  try {
    take(parameter, gradient);
  } catch (...) {
    if (s_.attempt.mode == Mode::plain) {
      driver_->note_error(std::current_exception());
    }
    throw;
  }
}

void Engine::take(int64_t parameter, const at::Tensor& gradient) {
  const auto index = s_.layout.slots[parameter].bucket;
  auto& bucket = s_.layout.buckets[index];
  if (bucket.launched) {
    on_late_gradient(parameter);
  }
  s_.late.reentrant =
      s_.late.reentrant || (s_.attempt.mode == Mode::managed &&
                            torch::autograd::get_current_graph_task_id() != s_.late.graph_task);
  const auto began = s_.watch.gradient(index);
  s_.tuner.note_gradient(parameter);
  if (s_.attempt.seen[parameter] == s_.attempt.generation) {
    bucket.join_current_stream();
    add_again(parameter, gradient);
    return;
  }
  s_.attempt.seen[parameter] = s_.attempt.generation;
  bucket.join_current_stream();
  place(parameter, gradient);
  s_.watch.end_copy(began);
  if (--bucket.pending == 0) {
    s_.watch.ready(index);
    advance_early();
  }
}

void Engine::on_late_gradient(int64_t parameter) {
  s_.late.came = true;
  s_.late.launch_late = true;
  TORCH_CHECK(false, "a parameter got a second gradient after its bucket was launched (parameter: ",
              s_.layout.name_of(parameter),
              "); a module used several times under reentrant checkpointing does that. From now on "
              "buckets are launched after backward: "
              "repeat the step (a BatchSizer does so by itself), or pass use_reentrant=False to "
              "checkpoint");
}

void Engine::begin(int buffer_source) {
  driver_->give_way(/*to_step=*/true);
  const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
  take_up_plan();
  s_.begin_times();
  auto& attempt = s_.attempt;
  attempt.mode = Mode::managed;
  attempt.plain = false;
  attempt.scales = {};
  attempt.scales.hook = s_.link.world_size;  // a hook returns the mean, a step wants the sum
  attempt.buffer_source = buffer_source;
  s_.late.came = false;
  s_.late.reentrant = false;
  std::fill(attempt.used.begin(), attempt.used.end(), uint8_t{0});
  start_backward(false);
}

void Engine::begin_plain(const Scales& scales, int buffer_source) {
  s_.attempt.plain = true;
  s_.attempt.scales = scales;
  s_.attempt.buffer_source = buffer_source;
  s_.late.came = false;
}

void Engine::set_order(ParticipantAttempt* before, ParticipantAttempt* after) {
  s_.attempt.before = before;
  s_.attempt.after = after;
}

void Engine::begin_piece(bool last, const at::Tensor& loss) {
  const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
  start_backward(last);
  if (loss.defined()) {
    loss.register_hook([weak = self_](const at::Tensor&) {
      if (const auto engine = weak.lock()) {
        engine->s_.late.graph_task = torch::autograd::get_current_graph_task_id();
      }
    });
  }
}

void Engine::start_backward(bool launching) {
  s_.attempt.launching = launching;
  ++s_.attempt.generation;
  for (auto& bucket : s_.layout.buckets) {
    bucket.pending = static_cast<int64_t>(bucket.parameters.size());
    bucket.stream.reset();
  }
  s_.watch.begin_backward(s_.layout.buckets.size());
  s_.tuner.begin_backward();
}

void Engine::lay_out(BucketPlan plan) {
  s_.hooks.forget_counts();
  s_.layout.lay_out(std::move(plan), /*dense=*/s_.hooks.is_set(), /*encodes=*/!s_.link.alone);
}

void Engine::take_up_plan() {
  auto& next = s_.tuner.next();
  if (next) {
    try {
      lay_out(*next);
    } catch (...) {  // the others have other buckets from now on: their sizes would not match
      s_.link.broken = std::current_exception();
      s_.link.abort();
      throw;
    }
    next.reset();
  }
}

void Engine::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  auto& layout = s_.layout;
  s_.hooks.set(std::move(hook));
  s_.link.alone = false;
  if (layout.plan_options.own_record) {
    return;
  }
  // The hook gets whole buckets, so the control record moves into one of its own.
  auto& next = s_.tuner.next();
  auto plan = next ? std::move(*next) : layout.plan;
  next.reset();
  layout.plan_options.own_record = true;
  layout.plan_options.record_dtype = layout.tail->dtype();
  if (!plan.buckets.back().parameters.empty()) {
    plan.buckets.push_back({{}, layout.tail->dtype(), s_.link.device, false, false});
  }
  lay_out(std::move(plan));
  s_.tuner.restart(layout);
}

// Several reducers of a group (turns.h).

void Engine::open_turn() {
  auto& turns = s_.turns;
  if (turns.opened || turns.ended || !s_.link.takes_turns()) {
    return;
  }
  const bool managed = s_.attempt.mode == Mode::managed;
  auto* const first = managed ? dynamic_cast<Engine*>(s_.attempt.before) : nullptr;
  if (first != nullptr && first->s_.link.group == s_.link.group) {  // it speaks for all of the step
    first->open_turn();
    turns.share_end_of(first->s_.turns);
  } else {
    Turn own{managed ? TurnKind::managed : TurnKind::plain, s_.link.number};
    Fnv<uint64_t> numbers;
    for (const auto* next = this; managed && next != nullptr;
         next = dynamic_cast<const Engine*>(next->s_.attempt.after)) {
      numbers.add(next->s_.link.number);
      own.detail = numbers.value();
    }
    turns.agree(own);
  }
  turns.opened = true;
}

void Engine::exchange_in_turn() {
  if (!s_.link.takes_turns()) {
    return;
  }
  s_.turns.agree({TurnKind::exchange, s_.link.number});
  if (std::exchange(s_.turns.ended, false)) {
    driver_->throw_turn_ended();
  }
}

}  // namespace brimful
