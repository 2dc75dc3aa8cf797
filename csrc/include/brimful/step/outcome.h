#pragma once
#include <brimful/export.h>
#include <brimful/step/late_sums.h>
#include <brimful/step/stage_note.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace brimful {

/// What a step does where one row takes more memory than there is, by the names of its model's modules, or the numbers of
/// a pipeline's stages.
struct StepRungs {
  std::vector<std::string> recomputed;  ///< they save nothing, and run once more in backward
  std::vector<std::string> offloaded;   ///< what they save lies in a file (on CUDA on the host)
  bool everything = false;              ///< whatever the step saves is offloaded

  bool empty() const { return recomputed.empty() && offloaded.empty() && !everything; }
  bool operator==(const StepRungs&) const = default;
};

/// "2 modules recomputed (layers.0, layers.1)".
BRIMFUL_API std::string to_string(const StepRungs& rungs);

/// One try of a step.
struct AttemptNote {
  int64_t pieces = 0;
  int64_t piece_rows = 0;  ///< of the largest piece; 0: no data
  /// Of this rank's device during the try. With several devices: of the one that ran out of memory, else of the fullest.
  int64_t peak_bytes = 0;
  std::vector<int> ran_out =
      {};  ///< ranks that ran out of memory in it, empty for the one that stands
  int64_t buckets_launched = 0;  ///< of this rank, when its work ended
  bool alone = false;            ///< repeated, and the other ranks are not informed
  bool cache_released = false;   ///< afterwards: fragments in torch's cache were the trouble
  int64_t garbage_bytes = 0;     ///< freed afterwards, since garbage in reference cycles held them
  StepRungs rungs = {};          ///< of this rank
};

/// How a step ended: of a BatchSizer, or of a Pipeline, whose pieces are its microbatches.
struct Outcome {
  LateNumber loss;  ///< weighted over all samples of all ranks; read, it may wait for the device
  std::vector<double> losses;  ///< of a step over pairs: each, on this rank
  LateNumber weight;           ///< of all ranks; read, it waits for a device that has it
  int64_t pieces = 0;          ///< on this rank, of those that have rows
  std::vector<int64_t>
      split;  ///< rows per piece; a sizer's step given the same split repeats it bit by bit
  /// Of a step by length: the row of the batch at each place of the split. Empty: as in the batch.
  std::vector<int64_t> order;
  StepRungs
      rungs;  ///< of the attempt that stands, on this rank; a sizer's step given these takes the same memory
  int64_t retries = 0;
  double total_ms = 0;  ///< of the attempt that stands, by the host's clock
  /// Of this rank's device during the step, retries included; with several the largest.
  int64_t peak_bytes = 0;
  std::vector<std::pair<c10::Device, int64_t>> peaks;  ///< the same, device by device
  /// By rank: milliseconds of its own work (ControlRecord::work_ms); NaN: not known. The largest is the straggler's.
  std::vector<double> work_ms;
  bool last = false;     ///< no rank has another batch, or all stop
  bool stop = false;     ///< a rank was asked to stop (stop.h), and all do after this step
  bool regroup = false;  ///< a rank wants to join, and all form a new group after this step
  std::vector<AttemptNote> attempts;
  std::vector<StageNote> stages;  ///< of a pipeline
};

}  // namespace brimful
