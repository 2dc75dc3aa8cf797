#pragma once
#include <brimful/export.h>
#include <brimful/step/outcome.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// A step as a Report remembers it.
struct StepNote {
  int64_t pieces = 0;
  int64_t piece_rows = 0;  ///< of the largest piece; 0: no data
  int64_t retries = 0;
  int64_t ooms = 0;        ///< on this rank
  int64_t peak_bytes = 0;  ///< of this rank's device; 0: its allocator keeps no statistics
  std::optional<int64_t> limit_bytes;
  double total_ms = 0;  ///< by the host's clock, from the first attempt on
  double lost_ms = 0;   ///< of these, in attempts that were repeated or failed
  bool stood = false;   ///< false: it raised
};

/// What a BatchSizer has seen on this rank since it was made.
struct Report {
  int64_t steps = 0;   ///< that stood
  int64_t failed = 0;  ///< that raised after their work had begun
  int64_t retries = 0;
  int64_t ooms = 0;            ///< out-of-memory errors on this rank
  int64_t cache_releases = 0;  ///< of torch's cache, where that was the remedy
  int64_t garbage_collections =
      0;                   ///< of reference cycles that held tensors, where that was the remedy
  int64_t piece_rows = 0;  ///< of a piece that fits; 0: nothing has run out of memory yet
  std::optional<int64_t> limit_bytes;  ///< of the last step
  int64_t peak_bytes = 0;              ///< of the last step
  /// Peak over limit, of the last step, the mean and the most of all; nothing without a limit.
  std::optional<double> last_fill;
  std::optional<double> mean_fill;
  std::optional<double> most_fill;
  double total_ms = 0;
  double lost_ms = 0;
  StepRungs rungs;         ///< of the last step that stood
  std::string loss_rule;   ///< by which pieces were weighted last, where it was found out
  int64_t trial_runs = 0;  ///< forwards and backwards of a few rows that finding it out took
  double trial_ms = 0;
  std::vector<StepNote> history;  ///< of the last 64 steps, oldest first
};

/// A few lines for people.
BRIMFUL_API std::string to_string(const Report& report);

}  // namespace brimful
