#include "pipeline/reference_executor.h"

#include <algorithm>

namespace brimful::test {

ReferenceExecutor::ReferenceExecutor(const pipeline::Schedule& schedule,
                                     const pipeline::CheckOptions& options)
    : schedule_(schedule),
      options_(options),
      communicates_(pipeline::has_communication(schedule)),
      at_(schedule.ranks.size()) {
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const auto& action : schedule.ranks[rank]) {
      owners_[action.stage].insert(static_cast<int>(rank));
    }
  }
}

Ending ReferenceExecutor::run() {
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < at_.size(); ++rank) {
      if (at_[rank] == schedule_.ranks[rank].size()) {
        continue;
      }
      const auto result = act(static_cast<int>(rank), schedule_.ranks[rank][at_[rank]]);
      if (result == Result::wrong) {
        return Ending::failed;
      }
      at_[rank] += result == Result::done ? 1 : 0;
      moved = moved || result != Result::waits;
    }
  }
  for (size_t rank = 0; rank < at_.size(); ++rank) {
    if (at_[rank] < schedule_.ranks[rank].size()) {
      return Ending::stuck;
    }
  }
  return is_all_done() ? Ending::complete : Ending::failed;
}

ReferenceExecutor::Channel ReferenceExecutor::channel(int from, int to,
                                                      const Action& action) const {
  switch (options_.channels) {
    case pipeline::ChannelKind::by_rank:
      return {owner(from), owner(to), 0, 0};
    case pipeline::ChannelKind::by_stage:
      return {from, to, 0, 0};
    default:
      return {from, to, action.microbatch, 1};
  }
}

ReferenceExecutor::Result ReferenceExecutor::act(int rank, const Action& action) {
  const auto [stage, kind, microbatch] = action;
  if (!is_stage(stage) || microbatch < 0 || microbatch >= schedule_.microbatches ||
      owners_[stage].size() > 1 || has(kind, stage, microbatch)) {
    return Result::wrong;
  }
  const auto result = is_compute(kind) ? compute(rank, action) : communicate(action);
  if (result == Result::done) {
    done_.insert({kind, stage, microbatch});
  }
  return result;
}

ReferenceExecutor::Result ReferenceExecutor::compute(int rank, const Action& action) {
  const auto [stage, kind, microbatch] = action;
  if (kind == Kind::forward) {
    return stage == 0 ? Result::done
                      : input(rank, stage - 1, has(Kind::forward, stage - 1, microbatch),
                              has(Kind::receive_forward, stage, microbatch));
  }
  const bool has_whole = has(Kind::backward, stage, microbatch);
  if (kind == Kind::backward_weight) {
    return has(Kind::backward_input, stage, microbatch) && !has_whole ? Result::done
                                                                      : Result::wrong;
  }
  if (has_whole || has(Kind::backward_input, stage, microbatch) ||
      !has(Kind::forward, stage, microbatch)) {
    return Result::wrong;
  }
  const bool next = has(Kind::backward, stage + 1, microbatch) ||
                    has(Kind::backward_input, stage + 1, microbatch);
  return stage == schedule_.stages - 1
             ? Result::done
             : input(rank, stage + 1, next, has(Kind::receive_backward, stage, microbatch));
}

ReferenceExecutor::Result ReferenceExecutor::input(int rank, int giver, bool made,
                                                   bool received) const {
  if (owner(giver) == rank || !communicates_) {
    return made ? Result::done : owner(giver) == rank ? Result::wrong : Result::waits;
  }
  return received ? Result::done : Result::wrong;
}

ReferenceExecutor::Result ReferenceExecutor::communicate(const Action& action) {
  const auto [stage, kind, microbatch] = action;
  const bool forward = kind == Kind::send_forward || kind == Kind::receive_forward;
  const bool sends = kind == Kind::send_forward || kind == Kind::send_backward;
  const int other = stage + (forward == sends ? 1 : -1);
  if (!is_stage(other) || owner(other) == owner(stage)) {
    return Result::wrong;
  }
  return sends ? send(action, channel(stage, other, action))
               : receive(action, channel(other, stage, action));
}

ReferenceExecutor::Result ReferenceExecutor::send(const Action& action, const Channel& key) {
  const auto [stage, kind, microbatch] = action;
  const bool made = kind == Kind::send_forward ? has(Kind::forward, stage, microbatch)
                                               : has(Kind::backward, stage, microbatch) ||
                                                     has(Kind::backward_input, stage, microbatch);
  if (!made) {
    return Result::wrong;
  }
  auto& messages = channels_[key];
  // A channel without room hands over to a receive that waits already.
  const auto room = options_.channel_capacity.value_or(1 << 20) + (waiting_.count(key) ? 1 : 0);
  if (static_cast<int64_t>(messages.size()) >= room) {
    return Result::waits;
  }
  messages.push_back(action);
  return Result::done;
}

ReferenceExecutor::Result ReferenceExecutor::receive(const Action& action, const Channel& key) {
  auto& messages = channels_[key];
  if (messages.empty()) {
    const bool tells = options_.channel_capacity == 0 && waiting_.insert(key).second;
    return tells ? Result::comes : Result::waits;
  }
  const auto message = messages.front();
  messages.pop_front();
  waiting_.erase(key);
  const bool forward = action.kind == Kind::receive_forward;
  const Action expected{action.stage + (forward ? -1 : 1),
                        forward ? Kind::send_forward : Kind::send_backward, action.microbatch};
  return message == expected ? Result::done : Result::wrong;
}

bool ReferenceExecutor::is_all_done() const {
  const auto is_empty = [](const auto& channel) { return channel.second.empty(); };
  bool good = std::all_of(channels_.begin(), channels_.end(), is_empty);
  const bool trains = std::any_of(done_.begin(), done_.end(), [](const Key& key) {
    return is_compute(std::get<0>(key)) && std::get<0>(key) != Kind::forward;
  });
  for (int stage = 0; stage < schedule_.stages; ++stage) {
    for (int microbatch = 0; microbatch < schedule_.microbatches; ++microbatch) {
      good = good && has(Kind::forward, stage, microbatch) &&
             (!trains || has(Kind::backward, stage, microbatch) ||
              has(Kind::backward_weight, stage, microbatch));
    }
  }
  return good;
}

}  // namespace brimful::test
