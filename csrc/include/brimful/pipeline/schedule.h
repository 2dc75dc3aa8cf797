#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace brimful::pipeline {

enum class ActionKind : uint8_t {
  forward,          ///< F
  backward,         ///< B: gradients of the inputs and of the parameters
  backward_input,   ///< I: gradients of the inputs alone
  backward_weight,  ///< W: what I left, gradients of the parameters
  send_forward,     ///< SEND_F: a stage's outputs to the next stage
  receive_forward,  ///< RECV_F: a stage's inputs from the stage before
  send_backward,    ///< SEND_B: gradients of a stage's inputs to the stage before
  receive_backward  ///< RECV_B: gradients of a stage's outputs from the next stage
};

struct Action {
  int stage = 0;
  ActionKind kind = ActionKind::forward;
  int microbatch = 0;
  bool operator==(const Action&) const = default;
};

/// What each rank (a process, or a thread with its device) does in a step, in order. Plain data: it holds for threads and
/// for processes alike. Without sends and receives a schedule is complete too: with_communication() derives them.
struct Schedule {
  std::string name;
  int stages = 0;
  int microbatches = 0;
  std::vector<std::vector<Action>> ranks;
};

}  // namespace brimful::pipeline
