#pragma once
#include <brimful/export.h>
#include <brimful/step/report.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace brimful {

/// Counts for a Report, in a fixed amount of memory.
class BRIMFUL_API StepRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  void begin_attempt(Clock::time_point now = Clock::now());
  void end_attempt(int64_t pieces, int64_t piece_rows, int64_t peak_bytes, bool out_of_memory);
  /// Another attempt follows.
  void note_retry(bool cache_released, bool garbage_collected);
  /// Does nothing where no attempt began since the last call.
  void end_step(bool stood, std::optional<int64_t> limit_bytes,
                Clock::time_point now = Clock::now());
  /// Since the attempt under way began.
  double attempt_ms(Clock::time_point now = Clock::now()) const;
  Report report(int64_t piece_rows) const;

 private:
  Report sums_;         ///< history: empty
  int64_t filled_ = 0;  ///< steps with a limit
  double fill_sum_ = 0;
  StepNote open_;
  bool running_ = false;
  Clock::time_point step_began_;
  Clock::time_point attempt_began_;
  std::array<StepNote, 64> ring_;
  size_t noted_ = 0;
};

}  // namespace brimful
