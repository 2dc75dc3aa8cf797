#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace brimful {

/// What a step with this batch would take.
struct Plan {
  int64_t pieces = 1;
  int64_t piece_rows = 0;      ///< of the largest piece
  std::vector<int64_t> split;  ///< of a batch by length: rows of each piece
  int64_t used_bytes = 0;      ///< in use already
  int64_t kept_bytes = 0;      ///< of that, the gradients that an accumulating step adds to
  /// Predicted, what is in use already included: of forward and backward, or of the optimizer's step if it takes more.
  int64_t peak_bytes = 0;
  /// On CUDA, predicted too: what torch's allocator has of the device at the peak, its cache included, as
  /// torch.cuda.max_memory_reserved; above limit_bytes where the pieces do not fit.
  std::optional<int64_t> reserved_bytes;
  std::optional<int64_t> limit_bytes;  ///< on CUDA without a limit what the device has for tensors
  /// What peak_bytes may be short by, and is kept free beside it: what earlier forecasts were short by, and on CUDA the
  /// share of a step that follows no law in the rows, such as workspaces of cuDNN.
  int64_t margin_bytes = 0;
  /// cuDNN tries algorithms at each new shape (its benchmark mode): what these take is in no forecast.
  bool workspaces_unknown = false;
  /// What the batch would take in one piece, of what limit_bytes bounds: on CUDA with the allocator's cache, as
  /// reserved_bytes. Nothing where the pieces are those of a forecast of before.
  std::optional<int64_t> whole_bytes;
  // What peak_bytes consists of; all of them together.
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t optimizer_bytes = 0;  ///< its state, the one that its first step will make included
  int64_t buffer_bytes = 0;
  int64_t activation_bytes = 0;  ///< the rest: temporaries too, and what else the program holds
};

}  // namespace brimful
