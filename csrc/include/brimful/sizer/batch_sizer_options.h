#pragma once
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/standing_bytes.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace brimful {

class GradScaler;  // <brimful/sizer/grad_scaler.h>
namespace ladder {
class Modules;
}

struct BatchSizerOptions {
  int64_t max_retries = 8;  ///< repeats of one step, alone or agreed
  int64_t pieces = 1;       ///< of the first batch, where piece_rows is not known
  /// Rows that are known to fit, such as a summary's largest_rows: the first batch is split into pieces of no more.
  std::optional<int64_t> piece_rows;
  /// Parameters in none of the reducers stay each rank's own, as is meant. False: with several ranks they are refused, as
  /// the ranks' models would drift apart.
  bool local = false;
  bool lockstep =
      false;  ///< the model has collectives of its own: all ranks run the same number of pieces
  /// Choose the pieces of a step by what its memory will be (on a CPU with a limit, on CUDA with torch's own
  /// allocator; outside lockstep). A StepInput made by hand needs a `kind` for that where batches differ in more than
  /// their rows.
  bool predict = false;
  /// Pieces of few sizes (split_into_few_sizes() of <brimful/step/pieces.h>): for a compiled model, which compiles for
  /// each that it meets.
  bool equal_pieces = false;
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< whose peak and limit count
  /// Bytes that no split can do without (parameters, gradients, optimizer state); compared with the limit. By
  /// default those of standing_bytes.
  std::function<int64_t()> required_bytes;
  /// For Plan and the text of BatchTooLarge; the constructor for a wrapped module has one, without an optimizer.
  std::function<StandingBytes()> standing_bytes;
  BatchNormPolicy batch_norm = BatchNormPolicy::warn;
  /// The model's, which `batch_norm` is for: batch_norms_of() of <brimful/sizer/batch_norms.h> finds torch::nn's.
  std::vector<BatchNormModule> batch_norms;
  /// Scales the seed of every backward; unscale, clip, step and update are the caller's. Its state is restored when a step
  /// is repeated. Must outlive the sizer, and be alike on all ranks.
  GradScaler* scaler = nullptr;
  /// Bytes that the optimizer's step will take beyond what is in use at a step's start, with gradients that are not there
  /// yet. Enters Plan; a step on the CPU whose optimizer would not fit fails before it begins. LibTorch's optimizers: next_step_bytes() of
  /// <brimful/sizer/optimizer_bytes.h>.
  std::function<int64_t()> optimizer_bytes;
  /// What may be recomputed or offloaded where one row does not fit; without it such a step throws BatchTooLarge.
  std::shared_ptr<ladder::Modules> ladder;
  bool recompute = true;
  bool offload = true;
  /// Steps bring a StepInput::vote: the first exchanges what the ranks know of it.
  bool finds_rule = false;
  /// BatchTooLarge names the rung that keeps the optimizer's state elsewhere: Python has it, and it is not asked for.
  bool state_may_leave = false;
};

}  // namespace brimful
