#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace brimful::probes {

/// What a training loop showed of its loader. Times are means over the measured steps, the first of each epoch apart.
struct LoaderFacts {
  int64_t steps = 0;
  double wait_ms = 0;                 ///< in the loader's next()
  std::optional<int64_t> late_steps;  ///< that waited at all noticeably
  double work_ms = 0;                 ///< in everything else of the step, the copy included
  std::optional<double> copy_ms;      ///< of a batch to the device, as the host waits: the median
  double first_wait_ms = 0;           ///< for an epoch's first batch
  int64_t epochs = 1;                 ///< that were begun

  int64_t num_workers = 0;
  std::optional<int64_t> prefetch_factor;
  bool pin_memory = false;
  bool persistent_workers = false;

  bool cuda = false;      ///< batches go to a GPU
  double cpus = 1;        ///< that this process and its workers may use
  int64_t processes = 1;  ///< that share these CPUs (ranks on this host)
  /// Of the worker's private memory that grew most, over `steps`.
  std::optional<int64_t> worker_growth_bytes;
};

struct LoaderAdvice {
  double wait_share = 0;  ///< of the step, spent waiting for data
  int64_t num_workers = 0;
  std::optional<int64_t> prefetch_factor;
  bool pin_memory = false;
  bool persistent_workers = false;
  std::vector<std::string> reasons;  ///< one for each thing to change, or why nothing
};

/// Workers so that a batch is ready when a step ends, no more than the CPUs that are left beside the training process; where
/// less than a twentieth of the time is spent waiting nothing is to be gained. Before 5 steps have been measured: the rule of
/// thumb, 4 workers a GPU, within the CPUs.
/// @throws c10::ValueError if a time or a count is negative, or there are no CPUs
BRIMFUL_API LoaderAdvice advise_loader(const LoaderFacts& facts);

}  // namespace brimful::probes
