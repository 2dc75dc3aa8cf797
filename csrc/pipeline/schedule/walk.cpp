#include "pipeline/schedule/walk.h"

#include "pipeline/schedule/messages.h"

namespace brimful::pipeline {
namespace {
/// For schedules without communication: the place of what makes an action's input, where another rank does that.
int maker_of_input(const Places& places, int place) {
  const auto& action = places.action(place);
  if (action.kind == ActionKind::backward_weight) {
    return -1;
  }
  const int stage = giver_of(action);
  int maker = -1;
  if (is_forward(action.kind)) {
    maker = places.find({stage, ActionKind::forward, action.microbatch});
  } else {
    maker = places.find({stage, ActionKind::backward, action.microbatch});
    maker =
        maker >= 0 ? maker : places.find({stage, ActionKind::backward_input, action.microbatch});
  }
  return maker >= 0 && places.rank(maker) != places.rank(place) ? maker : -1;
}
}  // namespace

std::vector<Need> needs_of(const Places& places, ChannelKind kind,
                           std::optional<int64_t> channel_capacity) {
  std::vector<Need> needs(places.size());
  if (!has_communication(places.schedule())) {
    for (int place = 0; place < places.size(); ++place) {
      needs[place].place = maker_of_input(places, place);
    }
    return needs;
  }
  for (const auto& channel : channels_of(places, kind)) {
    const bool waits_in_channel = channel_capacity != 0;
    for (size_t i = 0; i < channel.receives.size(); ++i) {
      const int send = places.find(other_end(places.action(channel.receives[i])));
      needs[channel.receives[i]] = {send, !waits_in_channel};
      if (!waits_in_channel) {
        needs[send] = {channel.receives[i], true};
      } else if (channel_capacity && i >= static_cast<size_t>(*channel_capacity)) {
        needs[channel.sends[i]].place = channel.receives[i - *channel_capacity];
      }
    }
  }
  return needs;
}

std::vector<int> walk(const Places& places, const std::vector<Need>& needs,
                      const std::function<void(int place)>& done) {
  const int ranks = static_cast<int>(places.schedule().ranks.size());
  std::vector<int> at(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    at[rank] = places.first(rank);
  }
  const auto is_met = [&](const Need& need) {
    return need.place < 0 || at[places.rank(need.place)] >= need.place + (need.reached ? 0 : 1);
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (at[rank] < places.end(rank) && is_met(needs[at[rank]])) {
        done(at[rank]++);
        moved = true;
      }
    }
  }
  return at;
}

}  // namespace brimful::pipeline
