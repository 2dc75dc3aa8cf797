// How a backward begins and its gradients come.
#include "reducer/engine.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "reducer/device_wait.h"

namespace brimful {

void Engine::set_up(BucketSet layout, BucketPlan plan, std::optional<Updates> updates) {
  layout_ = std::move(layout);
  updates_ = std::move(updates);
  watch_.set_device(link_.device, waits_in_streams(*link_.group, link_.device));
  lay_out(std::move(plan));
  transport_ = make_record_transport({link_, layout_, launcher_, watch_, attempt_});
}

void Engine::attach(std::weak_ptr<Engine> self, EngineDriver& driver) {
  self_ = std::move(self);
  driver_ = &driver;
  placement_.watch_histories([&](const at::Tensor& gradient) { driver.watch_gradient(gradient); });
  gradient_hooks_.add(layout_.parameters, [&](int64_t parameter) {
    return [weak = self_, parameter](const torch::autograd::variable_list& gradients) {
      if (const auto engine = weak.lock()) {
        engine->on_gradient(parameter, gradients[0]);
      }
    };
  });
}

void Engine::on_gradient(int64_t parameter, const at::Tensor& gradient) {
  auto lock = attempt_.lock();
  if (attempt_.is_idle() && !driver_->begin_backward(lock)) {
    return;
  }
  try {
    take(parameter, gradient);
  } catch (...) {
    if (attempt_.is_plain()) {
      driver_->note_error(std::current_exception());
    }
    throw;
  }
}

void Engine::take(int64_t parameter, const at::Tensor& gradient) {
  const auto index = layout_.slots[parameter].bucket;
  auto& bucket = layout_.buckets[index];
  if (bucket.launched) {
    throw_late(parameter);
  }
  late_.reentrant =
      late_.reentrant ||
      (attempt_.is_managed() && torch::autograd::get_current_graph_task_id() != late_.graph_task);
  const auto began = watch_.gradient(index);
  tuner_.note_gradient(parameter);
  bucket.join_current_stream();
  if (placement_.has_come(parameter)) {
    placement_.add_again(parameter, gradient);
    return;
  }
  const bool is_full = placement_.place_next(parameter, gradient);
  watch_.end_copy(began);
  if (is_full) {
    watch_.ready(index);
    advance_early();
  }
}

void Engine::throw_late(int64_t parameter) {
  late_.came = true;
  late_.launch_late = true;
  TORCH_CHECK(false, "a parameter got a second gradient after its bucket was launched (parameter: ",
              layout_.name_of(parameter),
              "); a module used several times under reentrant checkpointing does that. From now on "
              "buckets are launched after backward: "
              "repeat the step (a BatchSizer does so by itself), or pass use_reentrant=False to "
              "checkpoint");
}

void Engine::begin(int buffer_source) {
  driver_->give_way(/*to_step=*/true);
  transport_->drop_sums();
  const auto lock = attempt_.lock();
  take_up_plan();
  watch_.begin_step(link_.traffic->agreeing_ms);
  attempt_.begin_managed(buffer_source);
  late_.came = false;
  late_.reentrant = false;
  Scales scales;
  scales.hook = link_.world_size;  // a hook returns the mean, a step wants the sum
  placement_.set_scales(scales);
  placement_.forget();
  start_backward(false);
}

void Engine::begin_plain(const Scales& scales, int buffer_source, std::shared_ptr<SharedStep> step,
                         bool launches) {
  transport_->drop_sums();
  take_up_plan();
  attempt_.begin_plain(buffer_source);
  placement_.set_scales(scales);
  late_.came = false;
  if (step) {
    step_ = std::move(step);
    opened_ = false;
  }
  start_backward(launches);
}

/// The reducers of a group that follow each other in a StepGroup share what they agree on with the other ranks.
void Engine::set_order(ParticipantAttempt* before, ParticipantAttempt* after) {
  launcher_.set_order(before, after);
  if (!attempt_.is_managed()) {
    return;
  }
  const auto* earlier = dynamic_cast<const Engine*>(before);
  const bool shares = earlier != nullptr && earlier->link_.group == link_.group;
  step_ = shares ? earlier->step_ : std::make_shared<SharedStep>();
  step_->add(link_.number);
  opened_ = false;
}

void Engine::begin_piece(bool last, const at::Tensor& loss) {
  const auto lock = attempt_.lock();
  start_backward(last);
  if (loss.defined()) {
    loss.register_hook([weak = self_](const at::Tensor&) {
      if (const auto engine = weak.lock()) {
        engine->late_.graph_task = torch::autograd::get_current_graph_task_id();
      }
    });
  }
}

void Engine::start_backward(bool launching) {
  attempt_.begin_backward(launching);
  placement_.begin_backward();
  watch_.begin_backward(layout_.buckets.size());
  tuner_.begin_backward();
}

void Engine::lay_out(BucketPlan plan) {
  hooks_.forget_counts();
  layout_.lay_out(std::move(plan), /*dense=*/hooks_.is_set(), /*encodes=*/!link_.alone);
}

void Engine::take_up_plan() {
  auto& next = tuner_.next();
  if (next) {
    try {
      lay_out(*next);
    } catch (...) {  // the others have other buckets from now on: their sizes would not match
      link_.fail(std::current_exception());
      link_.abort();
      throw;
    }
    next.reset();
  }
}

void Engine::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  hooks_.set(std::move(hook));
  link_.end_short_way();
  if (layout_.plan_options.own_record) {
    return;
  }
  // The hook gets whole buckets, so the control record moves into one of its own.
  auto& next = tuner_.next();
  auto plan = next ? std::move(*next) : layout_.plan;
  next.reset();
  layout_.plan_options.own_record = true;
  layout_.plan_options.record_dtype = layout_.tail->dtype();
  if (!plan.buckets.back().parameters.empty()) {
    plan.buckets.push_back({{}, layout_.tail->dtype(), link_.device, false, false});
  }
  lay_out(std::move(plan));
  tuner_.restart(layout_);
}

}  // namespace brimful
