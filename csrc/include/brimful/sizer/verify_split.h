#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/split.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/transaction.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace brimful {

struct VerifyOptions {
  int64_t pieces = 2;
  /// What differences may be. Default: the square root of the epsilon of the coarsest dtype in use (float32: 3.5e-4).
  std::optional<double> rtol;
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< whose random numbers are put back
};

/// How a batch that was split compares with the same one unsplit.
struct SplitCheck {
  bool equal = false;  ///< loss and gradients, within `rtol`
  double rtol = 0;
  double loss_difference = 0;  ///< relative to the largest loss
  /// The largest, each parameter's relative to its largest value, or to 1 % of the largest of all parameters if that is
  /// more: a gradient that would be zero but for rounding has no digits to agree in.
  double gradient_difference = 0;
  std::string worst_parameter;  ///< whose gradient differs most
  /// Modules whose output depends on other rows of the batch than its own, where that began. Python only.
  std::vector<std::string> coupled;
  /// Modules that drew random numbers. Python only: there their pieces got the unsplit batch's numbers again.
  std::vector<std::string> random;
  bool drew_random = false;   ///< torch's generators were used
  bool loss_coupled = false;  ///< the modules agree, and the loss function does not. Python only.
};

namespace detail {
class CallLog;
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The work that is compared: BatchSizer's forward, and gradients of a loss times `seed` (undefined where there is none).
struct VerifyWork {
  std::function<PieceLoss(int64_t begin, int64_t end)> forward;
  std::function<std::vector<at::Tensor>(const at::Tensor& loss, const at::Tensor& seed,
                                        const std::vector<at::Tensor>& inputs)>
      gradients;
  std::function<std::vector<NamedTensor>(int64_t begin, int64_t end)> tensors = {};
};
/// torch::autograd::grad: gradients that lie in parameters are not touched, and hooks that reduce them not called.
BRIMFUL_API std::vector<at::Tensor> gradients_of(const at::Tensor& loss, const at::Tensor& seed,
                                                 const std::vector<at::Tensor>& inputs);
BRIMFUL_API SplitCheck verify_split(int64_t rows, const NamedTensors& parameters,
                                    Transaction& transaction, const VerifyWork& work,
                                    const VerifyOptions& options, CallLog* log = nullptr);
}  // namespace detail

/// Runs the batch once as it is and once in pieces, from the same buffers and random numbers, and compares loss and
/// gradients: they differ where a module or the loss function mixes rows of the batch (BatchNorm in training, contrastive
/// losses), and then a BatchSizer changes what is trained. Random numbers of a layer (dropout) differ with the split too:
/// with `drew_random`, set such layers aside before you judge. `module` has named_parameters() and buffers(); buffers,
/// random numbers, gradients and the batch, of which a copy is held, are left as they were. For a small batch; waits for the device.
/// @throws c10::ValueError if the batch has fewer rows than `pieces`, or no parameter needs a gradient; what `loss_fn`
/// throws
template <typename Module, typename Batch, typename LossFn>
SplitCheck verify_split(const Module& module, const Batch& batch, const LossFn& loss_fn,
                        const VerifyOptions& options = {}) {
  detail::NamedTensors parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  parameters = distinct_tensors(std::move(parameters),
                                [](const auto& item) -> const at::Tensor& { return item.second; });
  Transaction transaction({}, {options.device});
  transaction.follow([&] { return module.buffers(); });
  const auto forward = [&](int64_t begin, int64_t end) {
    return detail::as_piece_loss(loss_fn(slice_rows(batch, begin, end)), end - begin);
  };
  const auto tensors = [&](int64_t begin, int64_t end) {
    return detail::tensors_of(batch, begin, end);
  };
  return detail::verify_split(rows_of(batch), parameters, transaction,
                              {forward, detail::gradients_of, tensors}, options);
}

}  // namespace brimful
