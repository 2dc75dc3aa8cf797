#pragma once
#include <brimful/pipeline/schedule.h>

#include <optional>

namespace brimful::pipeline {

/// What the schedule's messages go through.
enum class ChannelKind : uint8_t {
  by_rank,  ///< one FIFO from each rank to each other one, as NCCL: messages are received in the order of their sends
  by_stage,   ///< one FIFO for each stage and direction, as transports that tag their messages
  by_message  ///< a place for each message, as threads of one process: any may be received first
};

struct CheckOptions {
  /// Messages that a channel holds: a send waits for room. 0: it waits for its receive. None: any number.
  std::optional<int64_t> channel_capacity;
  ChannelKind channels = ChannelKind::by_rank;
};

struct CheckResult {
  /// Each names actions with their ranks and places (counted from 0). A long list is cut, and its last entry says so.
  std::vector<std::string> problems;
  /// Of a schedule without other problems: who waits for whom in a circle. "rank 0 waits at 0RECV_B0 (action 3) for
  /// 1SEND_B0 of rank 1, which waits at ..."
  std::string cycle;

  bool ok() const { return problems.empty() && cycle.empty(); }
  /// "valid", or all that is wrong, in a line.
  BRIMFUL_API std::string to_string() const;
};

/// Whether ranks that do their actions in order, and wait in receives and in sends for which there is no room, come to
/// their ends: this is decided, not tried, and does not depend on how long anything takes. Every stage must have, for
/// each microbatch, one F, and one B or an I and a W (or no stage any of these: forward only), all on one rank, F
/// before them and I before W. With communication, every two neighbouring stages on different ranks need their sends,
/// after what makes the message, and their receives, before what uses it. Without, it is checked as
/// with_communication() completes it.
BRIMFUL_API CheckResult check(const Schedule& schedule, const CheckOptions& options = {});

/// @throws c10::ValueError with the schedule's name and CheckResult::to_string() unless check() finds it valid
BRIMFUL_API void require_valid(const Schedule& schedule, const CheckOptions& options = {});

}  // namespace brimful::pipeline
