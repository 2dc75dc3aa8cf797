#include "pipeline/schedule/places.h"

#include <brimful/pipeline/schedule_text.h>

#include <map>

#include "pipeline/schedule/messages.h"

namespace brimful::pipeline {
namespace {
constexpr int kActionKinds = 8;

size_t index_of(const Action& action, const Schedule& schedule) {
  const auto pair = static_cast<size_t>(action.stage) * schedule.microbatches + action.microbatch;
  return pair * kActionKinds + static_cast<size_t>(action.kind);
}
}  // namespace

Places::Places(const Schedule& schedule)
    : schedule_(schedule),
      place_(size_t{kActionKinds} * schedule.stages * schedule.microbatches, -1) {
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    first_.push_back(size());
    for (const auto& action : schedule.ranks[rank]) {
      auto& place = place_[index_of(action, schedule)];
      place = place < 0 ? size() : place;
      row_.push_back(&action);
      rank_.push_back(static_cast<int>(rank));
    }
  }
  first_.push_back(size());
}

int Places::find(const Action& action) const {
  const bool known = action.stage >= 0 && action.stage < schedule_.stages;
  return known ? place_[index_of(action, schedule_)] : -1;
}

std::string Places::text(int place) const {
  return to_string(action(place));
}

std::string Places::number(int place) const {
  return "action " + std::to_string(place - first(rank(place)));
}

std::string Places::full_text(int place) const {
  return text(place) + " (rank " + std::to_string(rank(place)) + ", " + number(place) + ")";
}

std::vector<MessageOrder> channels_of(const Places& places, ChannelKind kind) {
  std::map<std::pair<int, int>, MessageOrder> channels;
  for (int place = 0; place < places.size(); ++place) {
    const auto& action = places.action(place);
    if (is_compute(action.kind)) {
      continue;
    }
    const int other = places.find(other_end(action));
    const bool sends = is_send(action.kind);
    const int from = sends ? place : other;
    const int to = sends ? other : place;
    const auto& [sender, receiver] = std::pair(places.action(from), places.action(to));
    const auto key = kind == ChannelKind::by_rank    ? std::pair(places.rank(from), places.rank(to))
                     : kind == ChannelKind::by_stage ? std::pair(sender.stage, receiver.stage)
                                                     : std::pair(from, to);
    auto& channel = channels[key];
    (sends ? channel.sends : channel.receives).push_back(place);
  }
  std::vector<MessageOrder> result;
  result.reserve(channels.size());
  for (auto& [key, channel] : channels) {
    result.push_back(std::move(channel));
  }
  return result;
}

}  // namespace brimful::pipeline
