#pragma once
#include <functional>
#include <optional>

#include "pipeline/schedule/places.h"

namespace brimful::pipeline {

/// What an action waits for besides the action before it in its rank.
struct Need {
  int place = -1;        ///< -1: nothing
  bool reached = false;  ///< it need not be done: its rank has come to it
};

/// What each action of a schedule waits for: a receive for its send, a send for room in its channel. Without
/// communication an action waits for the one of another rank whose message it would receive.
std::vector<Need> needs_of(const Places& places, ChannelKind kind,
                           std::optional<int64_t> channel_capacity);

/// Does each rank's actions in their order, an action a rank in turn, as far as they go, and calls `done` for each,
/// after what it needs. Returns where each rank stands then: its end, or the action at which it waits for ever.
std::vector<int> walk(const Places& places, const std::vector<Need>& needs,
                      const std::function<void(int place)>& done);

}  // namespace brimful::pipeline
