// Which work an action is, in its turn; and what stands in the place of those that will not run.
#include "pipeline/executor/rank_run.h"

#include <brimful/pipeline/schedule_text.h>

#include <chrono>

#include "memory/left_bytes.h"
#include "pipeline/schedule/messages.h"

namespace brimful::pipeline {
namespace {
using Clock = std::chrono::steady_clock;

void require_turn(bool is_due, const Action& action) {
  TORCH_CHECK_VALUE(is_due,
                    "the schedule has an action too early, or twice (action: ", to_string(action),
                    "); check() says what is wrong with it");
}

Message taken(std::optional<Message>& place) {
  auto message = std::move(*place);
  place.reset();
  return message;
}
}  // namespace

void RankRun::run(StageRun& stage, const Action& action) {
  waited_ns_ = 0;
  const bool is_backward =
      gives_input_gradients(action.kind) || action.kind == ActionKind::backward_weight;
  if (is_backward && work_.before_backward) {
    work_.before_backward(action);
  }
  perform(stage, action);
  if (is_backward && work_.after_backward) {
    require_wanted();
    work_.after_backward(action);
  }
}

void RankRun::perform(StageRun& stage, const Action& action) {
  const bool counts = counts_bytes_ && (action.kind == ActionKind::forward ||
                                        action.kind == ActionKind::backward_input);
  if (!counts) {
    return act(stage, action);
  }
  const memory::LeftBytes left(stage.device);
  act(stage, action);
  stage.hold(stage.flights[action.microbatch], left.bytes());
}

void RankRun::act(StageRun& stage, const Action& action) {
  const auto microbatch = action.microbatch;
  const auto phase = stage.flights[microbatch].phase;
  if (microbatch >= work_.filled && is_compute(action.kind)) {
    return pass_by(stage, action);
  }
  switch (action.kind) {
    case ActionKind::forward:
      require_turn(phase == Phase::due, action);
      return forward(stage, microbatch);
    case ActionKind::backward:
    case ActionKind::backward_input:
      require_turn(phase == Phase::forwarded, action);
      return backward(stage, microbatch, action.kind == ActionKind::backward_input);
    case ActionKind::backward_weight:
      require_turn(phase == Phase::inputs_done, action);
      return backward_weight(stage, microbatch);
    case ActionKind::send_forward:
      require_turn(stage.waiting_outputs[microbatch].has_value(), action);
      stage.outputs->send(microbatch, taken(stage.waiting_outputs[microbatch]));
      return;
    case ActionKind::send_backward:
      require_turn(stage.waiting_gradients[microbatch].has_value(), action);
      stage.input_gradients->send(microbatch, taken(stage.waiting_gradients[microbatch]));
      return;
    case ActionKind::receive_forward:
      require_turn(stage.inputs_apart && !stage.received[microbatch], action);
      stage.received[microbatch] = receive(*stage.inputs, microbatch);
      return;
    case ActionKind::receive_backward:
      require_turn(stage.outputs_apart && !stage.received_gradients[microbatch], action);
      stage.received_gradients[microbatch] = receive(*stage.output_gradients, microbatch);
      return;
  }
}

Message RankRun::receive(Channel& channel, int microbatch) {
  const auto began = Clock::now();
  waits_.store(true, std::memory_order_relaxed);
  auto message = channel.receive(microbatch);  // what it throws ends the rank's step
  waits_.store(false, std::memory_order_relaxed);
  waited_ns_ = std::chrono::nanoseconds(Clock::now() - began).count();
  return message;
}

Message RankRun::take(Channel& channel, bool apart, std::optional<Message>& received,
                      int microbatch) {
  TORCH_CHECK_VALUE(!apart || received.has_value(),
                    "the schedule uses a message that it has not received (microbatch: ",
                    microbatch, "); check() says what is wrong with it");
  return apart ? taken(received) : receive(channel, microbatch);
}

void RankRun::require_wanted() const {
  if (cancelled_.load(std::memory_order_acquire)) {
    throw Cancelled();
  }
}

void RankRun::make_up(StageRun& stage, const Action& action) {
  const auto microbatch = action.microbatch;
  // A peer that is gone does not matter: others wait all the same.
  const auto discard = [&](Channel* channel) {
    try {
      if (channel != nullptr) {
        channel->discard(microbatch);
      }
    } catch (const std::exception&) {
    }
  };
  const auto send_failure = [&](Channel* channel) {
    try {
      if (channel != nullptr) {
        channel->send_failure(microbatch);
      }
    } catch (const std::exception&) {
    }
  };
  switch (action.kind) {
    case ActionKind::forward:
      discard(stage.inputs);
      return send_failure(stage.outputs);
    case ActionKind::backward:
    case ActionKind::backward_input:
      discard(stage.output_gradients);
      return send_failure(stage.input_gradients);
    case ActionKind::send_forward:  // its forward may be behind it
      return send_failure(stage.outputs);
    case ActionKind::send_backward:
      return send_failure(stage.input_gradients);
    default:  // receives are made up for where their message is used
      return;
  }
}

void RankRun::pass_by(StageRun& stage, const Action& action) {
  const auto microbatch = action.microbatch;
  auto& phase = stage.flights[microbatch].phase;
  if (action.kind == ActionKind::forward) {
    if (stage.inputs != nullptr) {
      take(*stage.inputs, stage.inputs_apart, stage.received[microbatch], microbatch);
    }
    if (stage.outputs != nullptr) {
      send_outputs(stage, microbatch, {});
    }
    phase = work_.loss ? Phase::forwarded : Phase::done;
  } else if (action.kind == ActionKind::backward_weight) {
    phase = Phase::done;
  } else {
    if (stage.output_gradients != nullptr) {
      take(*stage.output_gradients, stage.outputs_apart, stage.received_gradients[microbatch],
           microbatch);
    }
    send_gradients(stage, microbatch, {});
    phase = action.kind == ActionKind::backward ? Phase::done : Phase::inputs_done;
  }
}

}  // namespace brimful::pipeline
