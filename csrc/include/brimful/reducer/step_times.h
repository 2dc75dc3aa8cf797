#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brimful {

/// When things happened to a bucket, in ms since its step's beginning: by the host's clock; over NCCL a
/// collective has ended there when the stream was made to wait for it. In a step that is timed by its device (StepTimes) ready_ms, launch_ms and
/// done_ms are the device's: it had its gradients, so that its collective could begin, and had ended it (over gloo done_ms is
/// the host's); NaN where it does not say, since the step began in a stream that the others did not wait for.
struct BucketTimes {
  double first_ms = 0;   ///< its first gradient came
  double ready_ms = 0;   ///< its last gradient came
  double launch_ms = 0;  ///< its collective was called
  double done_ms = 0;    ///< its collective ended
  int64_t bytes = 0;     ///< that its collective carried
  int64_t parameters = 0;
};

/// What a step did with its time. It begins with its forward (plain loop) or attempt (sizer) and ends with its verdict.
struct StepTimes {
  int64_t step = 0;
  double begin_s = 0;  ///< on the monotonic clock
  double backward_ms =
      0;  ///< from the first gradient of the last backward to the last collective's call
  double copy_ms = 0;    ///< moving gradients into buckets, in all threads of autograd together
  double launch_ms = 0;  ///< calling collectives
  double wait_ms = 0;    ///< the step's end waited for collectives: communication that nothing hid
  double total_ms = 0;
  int64_t bytes = 0;  ///< that all buckets' collectives carried
  /// The rank that came last to its last bucket, and by how much against the fastest; on CUDA by the devices' time in the
  /// last step before that they timed, without a wait for it (in the first step by the hosts'). Ranks that do not know theirs are left out;
  /// -1 and 0 if none does.
  int straggler = 0;
  double straggler_ms = 0;
  /// Its device has timed it, as it does with the first ten steps, and with one of sixteen from then on: events cost the host
  /// calls. Never on the CPU.
  bool by_device = false;
  std::vector<BucketTimes> buckets;
};

/// A trace in Chrome's JSON format, for chrome://tracing and Perfetto: a row for backward's buckets, a row for their
/// collectives, one process a rank.
BRIMFUL_API std::string to_chrome_trace(const std::vector<StepTimes>& steps, int rank);

}  // namespace brimful
