#pragma once
#include <brimful/export.h>

#include <cstdint>

namespace torch::optim {
class Optimizer;  // defined in <torch/optim/optimizer.h>
}  // namespace torch::optim

namespace brimful {

/// What the next step of LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad takes at most beyond what is in use now, in bytes:
/// gradients that are not there yet, state that it will make, and what it holds meanwhile. 0 for other optimizers, whose
/// first step shows. Reads no data; any thread, but not during a step.
///   options.optimizer_bytes = [&] { return brimful::next_step_bytes(optimizer); };
BRIMFUL_API int64_t next_step_bytes(const torch::optim::Optimizer& optimizer);

}  // namespace brimful
