#include "reducer/engine.h"

#include <utility>

#include "reducer/device_wait.h"

namespace brimful {

void Engine::set_up(BucketSet layout, BucketPlan plan, std::optional<Updates> updates) {
  auto& link = parts_.link;
  parts_.layout = std::move(layout);
  parts_.updates = std::move(updates);
  parts_.watch.set_device(link.device, waits_in_streams(*link.group, link.device));
  parts_.tuner.lay_out(std::move(plan));
  parts_.transport =
      make_record_transport({link, parts_.layout, parts_.launcher, parts_.watch, parts_.attempt});
}

void Engine::attach(const std::weak_ptr<Engine>& self, EngineDriver& driver) {
  step_.attach(std::shared_ptr<Arrivals>(self.lock(), &parts_.arrivals));
  parts_.driver = &driver;
  parts_.placement.watch_histories(
      [&](const at::Tensor& gradient) { driver.watch_gradient(gradient); });
  gradient_hooks_.add(parts_.layout.parameters, [&](int64_t parameter) {
    return [weak = self, parameter](const torch::autograd::variable_list& gradients) {
      if (const auto engine = weak.lock()) {
        engine->on_gradient(parameter, gradients[0]);
      }
    };
  });
}

void Engine::on_gradient(int64_t parameter, const at::Tensor& gradient) {
  auto& attempt = parts_.attempt;
  auto lock = attempt.lock();
  if (attempt.is_idle() && !parts_.driver->begin_backward(lock)) {
    return;
  }
  try {
    if (parts_.arrivals.take(parameter, gradient)) {
      step_.advance_early();
    }
  } catch (...) {
    if (attempt.is_plain()) {
      parts_.driver->note_error(std::current_exception());
    }
    throw;
  }
}

void Engine::open_exchange(bool settles) {
  if (settles) {
    parts_.driver->give_way(/*to_step=*/false);
  }
  SharedStep asked;
  if (!asked.open_exchange(parts_.link)) {
    parts_.driver->throw_step_ended(asked);
  }
}

/// The hook gets whole buckets.
void Engine::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  parts_.hooks.set(std::move(hook));
  parts_.link.end_short_way();
  parts_.tuner.separate_record();
}

void Engine::forget_updates() {
  if (parts_.updates) {
    parts_.updates->forget();
  }
}

}  // namespace brimful
