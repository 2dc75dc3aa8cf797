#include <brimful/pipeline/checker.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "pipeline/schedule/findings.h"
#include "pipeline/schedule/messages.h"
#include "pipeline/schedule/walk.h"

namespace brimful::pipeline {
namespace {
/// In a FIFO the n-th receive gets the n-th send's message.
void find_crossed(const Places& places, ChannelKind kind, Findings& findings) {
  for (const auto& channel : channels_of(places, kind)) {
    for (size_t i = 0; i < channel.sends.size(); ++i) {
      const int send = channel.sends[i];
      const int receive = channel.receives[i];
      if (places.find(other_end(places.action(receive))) != send) {
        findings.add(places.full_text(receive) + " would get the message of " +
                     places.full_text(send) + ", which is sent before its own");
        break;  // the rest follows from it
      }
    }
  }
}

/// Who waits for whom, from any rank that waits for ever, in a circle: each waits for an action that another one, which
/// waits too, has before it.
std::string cycle_text(const Places& places, const std::vector<Need>& needs,
                       const std::vector<int>& at) {
  int rank = 0;
  while (at[rank] == places.end(rank)) {
    ++rank;
  }
  const auto next = [&](int from) { return places.rank(needs[at[from]].place); };
  std::vector<bool> seen(at.size());
  for (; !seen[rank]; rank = next(rank)) {
    seen[rank] = true;
  }
  std::string text;
  const int begin = rank;
  do {
    const int other = next(rank);
    text += text.empty() ? "rank " + std::to_string(rank) + " waits at " : ", which waits at ";
    text += places.text(at[rank]) + " (" + places.number(at[rank]) + ") for " +
            places.text(needs[at[rank]].place) + " of rank " + std::to_string(other);
    rank = other;
  } while (rank != begin);
  return text;
}

std::vector<std::string> problems_of(const Schedule& schedule, ChannelKind channels) {
  Findings findings;
  find_out_of_range(schedule, findings);
  if (findings.none()) {
    const Places places(schedule);
    find_doubled(places, findings);
    find_missing(places, findings);
    find_misordered(places, findings);
    if (findings.none() && has_communication(schedule)) {
      find_crossed(places, channels, findings);
    }
  }
  return findings.take();
}
}  // namespace

std::string CheckResult::to_string() const {
  if (ok()) {
    return "valid";
  }
  std::string text = cycle.empty() ? "" : "it deadlocks: " + cycle;
  for (const auto& problem : problems) {
    text += (text.empty() ? "" : "; ") + problem;
  }
  return text;
}

CheckResult check(const Schedule& schedule, const CheckOptions& options) {
  TORCH_CHECK_VALUE(options.channel_capacity.value_or(0) >= 0,
                    "a channel cannot hold fewer than 0 messages (channel_capacity: ",
                    *options.channel_capacity, "); leave it out for any number");
  CheckResult result;
  result.problems = problems_of(schedule, options.channels);
  if (!result.ok()) {
    return result;
  }
  const Places places(schedule);
  const auto needs = needs_of(places, options.channels, options.channel_capacity);
  const auto at = walk(places, needs, [](int) {});
  for (size_t rank = 0; rank < at.size() && result.ok(); ++rank) {
    if (at[rank] < places.end(static_cast<int>(rank))) {
      result.cycle = cycle_text(places, needs, at);
    }
  }
  if (result.ok() && options.channel_capacity && !has_communication(schedule)) {
    const auto complete = with_communication(schedule);
    // A schedule on one rank has nothing to send, and is valid as it is.
    return has_communication(complete) ? check(complete, options) : result;
  }
  return result;
}

void require_valid(const Schedule& schedule, const CheckOptions& options) {
  const auto result = check(schedule, options);
  TORCH_CHECK_VALUE(result.ok(), "the schedule cannot be run (schedule: ", schedule.name,
                    "): ", result.to_string(), "; correct it, or take a built-in one");
}

}  // namespace brimful::pipeline
