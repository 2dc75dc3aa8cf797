#include "step/repetition.h"

#include <brimful/log.h>

#include "base/format.h"

namespace brimful {
namespace {
/// What was done so that the same may do; empty: nothing.
std::string remedy_text(const AttemptNote& failed) {
  if (failed.cache_released) {
    return "the bytes were there, in torch's cache, which is released, and ";
  }
  return failed.garbage_bytes > 0
             ? format_bytes(failed.garbage_bytes) + " of garbage in reference cycles is freed, and "
             : std::string();
}
}  // namespace

std::string to_string(const Repetition& repetition, const AttemptNote& failed) {
  const auto who = "rank " + std::to_string(repetition.rank);
  const auto where = repetition.where.empty() ? "" : ", in the " + repetition.where;
  if (!repetition.reason.empty()) {
    return who + ", " + repetition.what + where + ": " + repetition.reason;
  }
  const auto here = who + " ran out of memory in " + repetition.what + where + ": ";
  if (repetition.as_it_was) {
    return here + remedy_text(failed) + "it is repeated as it was";
  }
  return here + "a batch of " + std::to_string(repetition.rows) + " is repeated in " +
         std::to_string(repetition.more) + " " + repetition.unit + " instead of " +
         std::to_string(repetition.pieces);
}

void log_repetition(const Repetition& repetition, const AttemptNote& failed) {
  log(LogLevel::warning, to_string(repetition, failed));
}

}  // namespace brimful
