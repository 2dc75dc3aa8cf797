#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "pipeline/schedule/messages.h"
#include "pipeline/schedule/walk.h"

namespace brimful::pipeline {
namespace {
using Ranks = std::vector<std::vector<Action>>;

/// A message's way: what makes it, and the receive and what uses it on another rank.
struct MessageWay {
  Action send;
  int from_rank;
  int to_rank;
  int use;  ///< place of the action that uses it
};

/// What F, B or I sends to another rank; nothing for others, and where the other stage is on the same rank.
std::vector<MessageWay> message_of(const Places& places, int place) {
  const auto& action = places.action(place);
  if (action.kind == ActionKind::backward_weight) {
    return {};
  }
  const int stage = taker_of(action);
  int use = places.find({stage, action.kind, action.microbatch});
  if (use < 0 && !is_forward(action.kind)) {  // one stage has B, its neighbour I
    const bool whole = action.kind == ActionKind::backward;
    use = places.find(
        {stage, whole ? ActionKind::backward_input : ActionKind::backward, action.microbatch});
  }
  if (use < 0 || places.rank(use) == places.rank(place)) {
    return {};
  }
  return {{send_of(action), places.rank(place), places.rank(use), use}};
}

/// Receives beside their sends: each message is received by what its receiver does next when it is sent.
Ranks receives_when_sent(const Places& places) {
  Ranks ranks(places.schedule().ranks.size());
  walk(places, needs_of(places, ChannelKind::by_rank, std::nullopt), [&](int place) {
    ranks[places.rank(place)].push_back(places.action(place));
    for (const auto& message : message_of(places, place)) {
      ranks[message.from_rank].push_back(message.send);
      ranks[message.to_rank].push_back(other_end(message.send));
    }
  });
  return ranks;
}

/// Receives as late as FIFO channels allow: a message is received before it is used, and before any that was sent after
/// it.
Ranks receives_before_use(const Places& places) {
  std::map<std::pair<int, int>, std::vector<MessageWay>> channels;
  Ranks ranks(places.schedule().ranks.size());
  for (int place = 0; place < places.size(); ++place) {
    for (const auto& message : message_of(places, place)) {
      channels[{message.from_rank, message.to_rank}].push_back(message);
    }
  }
  std::vector<std::vector<Action>> receives(places.size());  // before each action
  for (auto& [ends, messages] : channels) {
    int latest = places.size();
    std::for_each(messages.rbegin(), messages.rend(), [&](auto& message) {
      latest = std::min(latest, message.use);
      message.use = latest;
    });
    for (const auto& message : messages) {
      receives[message.use].push_back(other_end(message.send));
    }
  }
  for (int place = 0; place < places.size(); ++place) {
    auto& actions = ranks[places.rank(place)];
    actions.insert(actions.end(), receives[place].begin(), receives[place].end());
    actions.push_back(places.action(place));
    for (const auto& message : message_of(places, place)) {
      actions.push_back(message.send);
    }
  }
  return ranks;
}
}  // namespace

Schedule with_communication(const Schedule& schedule, ReceivePlace place) {
  TORCH_CHECK_VALUE(!has_communication(schedule),
                    "the schedule has sends and receives already (schedule: ", schedule.name,
                    "); pass one without any");
  require_valid(schedule);
  const Places places(schedule);
  auto result = schedule;
  result.ranks =
      place == ReceivePlace::before_use ? receives_before_use(places) : receives_when_sent(places);
  return result;
}

}  // namespace brimful::pipeline
