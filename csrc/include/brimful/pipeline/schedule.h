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
  backward_weight,  ///< W: the rest of a backward after I: gradients of the parameters
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

/// What each rank (a process, or a thread with its device) does in a step, in order. Plain data: it holds for threads
/// and for processes alike. Without sends and receives a schedule is complete too: with_communication() derives them.
struct Schedule {
  std::string name;
  int stages = 0;
  int microbatches = 0;
  std::vector<std::vector<Action>> ranks;
  int64_t ignored = 0;  ///< actions of a file that mean nothing here: see from_csv()
};

// All functions on schedules are pure: they may be called from any thread and touch no device.

/// F, B, I or W.
constexpr bool is_compute(ActionKind kind) {
  return kind <= ActionKind::backward_weight;
}

/// The rank of each stage's actions; -1 for a stage without any.
/// @throws c10::ValueError if a stage is on two ranks, or an action's stage is none of the schedule's
BRIMFUL_API std::vector<int> rank_of_stage(const Schedule& schedule);

/// Whether there is any send or receive.
BRIMFUL_API bool has_communication(const Schedule& schedule);

/// Whether there is any B, I or W: without, it is for inference.
BRIMFUL_API bool has_backward(const Schedule& schedule);

/// Where with_communication() puts receives. Sends follow the action that makes what they send, at once.
enum class ReceivePlace : uint8_t {
  before_use,  ///< as late as possible, for receives that block: they wait for no more than what uses them does
  when_sent  ///< beside the send, for receives that are posted early: no channel needs to hold a message
};

/// The schedule with its sends and receives: one of each for every microbatch and every two neighbouring stages on
/// different ranks, in each direction. Between two ranks messages are received in the order in which they are sent
/// (FIFO). When `place` is before_use, channels that hold any number of messages never deadlock; when_sent needs no
/// room in them at all.
/// @throws c10::ValueError if the schedule has some already, or is not valid (see check())
BRIMFUL_API Schedule with_communication(const Schedule& schedule,
                                        ReceivePlace place = ReceivePlace::before_use);

}  // namespace brimful::pipeline
