#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace brimful {

/// Bytes on the device that do not depend on the batch.
struct Holdings {
  int64_t parameters = 0;
  int64_t gradients = 0;  ///< of all parameters that need one
  int64_t optimizer_state = 0;
  int64_t buffers = 0;
  int64_t optimizer_step = 0;  ///< what it takes over what is in use without gradients
};

/// What a step with this batch would take.
struct Plan {
  int64_t pieces = 1;
  int64_t piece_rows = 0;  ///< of the largest piece
  int64_t used_bytes = 0;  ///< in use already
  /// Predicted, what is in use already included: of forward and backward, or of the optimizer's step if it takes more.
  int64_t peak_bytes = 0;
  std::optional<int64_t> limit_bytes;
  // What peak_bytes consists of; all of them together.
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t optimizer_bytes = 0;  ///< its state, the one that its first step will make included
  int64_t buffer_bytes = 0;
  int64_t activation_bytes = 0;  ///< the rest: temporaries too, and what else the program holds
};

namespace detail {
/// Of a model without its optimizer.
BRIMFUL_API Holdings holdings_of(const std::vector<at::Tensor>& parameters,
                                 const std::vector<at::Tensor>& buffers, c10::Device device);
}  // namespace detail

}  // namespace brimful
