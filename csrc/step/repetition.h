#pragma once
#include <brimful/export.h>
#include <brimful/step/outcome.h>

#include <cstdint>
#include <string>

namespace brimful {

/// A unit of work that is run again, as the log says it.
struct Repetition {
  int rank = 0;
  std::string what = {};    ///< "step 3"
  std::string where = {};   ///< in it, "forward of microbatch 1 in stage 0 (...)"; empty: not known
  std::string reason = {};  ///< in place of all that follows
  int64_t rows = 0;
  bool as_it_was = false;  ///< else in `more` pieces after `pieces`
  int64_t pieces = 0;
  int64_t more = 0;
  const char* unit = "pieces";
};

/// "rank 1 ran out of memory in step 3: a batch of 512 is repeated in 7 pieces instead of 3". Pure.
BRIMFUL_API std::string to_string(const Repetition& repetition, const AttemptNote& failed);
/// A warning of that.
void log_repetition(const Repetition& repetition, const AttemptNote& failed);

}  // namespace brimful
