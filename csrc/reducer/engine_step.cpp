// How a step of a reducer begins, and each backward of it.
#include "reducer/engine_step.h"

#include <utility>

namespace brimful {

EngineStep::EngineStep(Engine& engine, EngineParts& parts)
    : engine_(engine),
      link_(parts.link),
      layout_(parts.layout),
      hooks_(parts.hooks),
      tuner_(parts.tuner),
      watch_(parts.watch),
      attempt_(parts.attempt),
      placement_(parts.placement),
      launcher_(parts.launcher),
      transport_(parts.transport),
      gate_(parts.gate),
      arrivals_(parts.arrivals),
      updates_(parts.updates),
      driver_(parts.driver) {}

void EngineStep::begin(int buffer_source) {
  driver_->give_way(/*to_step=*/true);
  transport_->require_sums();
  transport_->drop_sums();
  const auto lock = attempt_.lock();
  tuner_.take_up();
  watch_.begin_step(link_.traffic->agreeing_ms);
  attempt_.begin_managed(buffer_source);
  arrivals_.begin_step(/*managed=*/true);
  Scales scales;
  scales.hook = link_.world_size;  // a hook returns the mean, a step wants the sum
  placement_.set_scales(scales);
  placement_.forget();
  start_backward(false);
}

void EngineStep::begin_plain(const Scales& scales, int buffer_source,
                             std::shared_ptr<SharedStep> step, bool launches) {
  transport_->drop_sums();
  tuner_.take_up();
  attempt_.begin_plain(buffer_source);
  placement_.set_scales(scales);
  arrivals_.begin_step(/*managed=*/false);
  if (step) {
    gate_.enter(std::move(step));
  }
  start_backward(launches);
}

void EngineStep::set_order(ParticipantAttempt* before, ParticipantAttempt* after) {
  launcher_.set_order(before, after);
  if (attempt_.is_managed()) {
    const auto* earlier = dynamic_cast<const EngineStep*>(before);
    gate_.enter_after(earlier == nullptr ? nullptr : &earlier->gate_);
  }
}

void EngineStep::begin_piece(bool last, const at::Tensor& loss) {
  const auto lock = attempt_.lock();
  start_backward(last);
  if (loss.defined()) {
    Arrivals::watch(loss, watched_);
  }
}

void EngineStep::end_unsent_backward() {
  const auto lock = attempt_.lock();
  placement_.end_backward();
  attempt_.leave();
}

void EngineStep::start_backward(bool launching) {
  attempt_.begin_backward(launching);
  arrivals_.begin_backward();
}

}  // namespace brimful
