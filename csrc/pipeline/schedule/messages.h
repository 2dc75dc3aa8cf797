#pragma once
#include <brimful/pipeline/schedule.h>

namespace brimful::pipeline {

// What belongs together: a stage's action, the message that it makes, and the one that it needs.

constexpr bool is_send(ActionKind kind) {
  return kind == ActionKind::send_forward || kind == ActionKind::send_backward;
}

/// B or I: what makes gradients of a stage's inputs.
constexpr bool gives_input_gradients(ActionKind kind) {
  return kind == ActionKind::backward || kind == ActionKind::backward_input;
}

/// Whether an action's message goes between a stage and the next one as outputs do, rather than back as gradients do.
constexpr bool is_forward(ActionKind kind) {
  return kind == ActionKind::forward || kind == ActionKind::send_forward ||
         kind == ActionKind::receive_forward;
}

/// The other end of a send's or a receive's message.
constexpr Action other_end(const Action& action) {
  switch (action.kind) {
    case ActionKind::send_forward:
      return {action.stage + 1, ActionKind::receive_forward, action.microbatch};
    case ActionKind::receive_forward:
      return {action.stage - 1, ActionKind::send_forward, action.microbatch};
    case ActionKind::send_backward:
      return {action.stage - 1, ActionKind::receive_backward, action.microbatch};
    case ActionKind::receive_backward:
      return {action.stage + 1, ActionKind::send_backward, action.microbatch};
    default:
      return action;
  }
}

/// The send of what F, B or I makes; only where another stage takes it.
constexpr Action send_of(const Action& compute) {
  const auto kind = is_forward(compute.kind) ? ActionKind::send_forward : ActionKind::send_backward;
  return {compute.stage, kind, compute.microbatch};
}

/// The receive of what F, B or I needs; W needs none, and gets its I's, which has come.
constexpr Action receive_for(const Action& compute) {
  const auto kind =
      is_forward(compute.kind) ? ActionKind::receive_forward : ActionKind::receive_backward;
  return {compute.stage, kind, compute.microbatch};
}

/// The stage that takes what F, B or I makes: none of the schedule's, or -1, at its ends.
constexpr int taker_of(const Action& compute) {
  return is_forward(compute.kind) ? compute.stage + 1 : compute.stage - 1;
}

/// The stage that gives what F, B or I needs.
constexpr int giver_of(const Action& compute) {
  return is_forward(compute.kind) ? compute.stage - 1 : compute.stage + 1;
}

}  // namespace brimful::pipeline
