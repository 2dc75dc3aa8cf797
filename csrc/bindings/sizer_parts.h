#pragma once
// What the bindings of the sizer and of verify_split have in common.
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/step.h>
#include <brimful/step/transaction.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "ladder/modules.h"

namespace brimful {

/// PeakModel, Report, Outcome, Plan, and what they hold.
void bind_sizer_values(py::module_& m);

/// What a loss function returned: the mean loss, of this weight, or (mean loss, weight).
/// @throws c10::TypeError for anything else
PieceLoss as_piece_loss(const py::object& result, double weight);
inline PieceLoss as_piece_loss(const py::object& result, int64_t rows) {
  return as_piece_loss(result, static_cast<double>(rows));
}

void run_python_backward(const at::Tensor& loss, const at::Tensor& gradient);

Transaction::Keeper keeper_of(py::function capture, py::function restore);

/// The object's methods are those of ladder::Modules.
std::shared_ptr<ladder::Modules> ladder_modules_of(py::object modules);

/// Of modules with their names, those of torch.nn's BatchNorm, and those whose buffers may be running statistics; they are
/// not kept alive.
std::vector<BatchNormModule> batch_norms_of(
    const std::vector<std::pair<std::string, py::object>>& modules);

}  // namespace brimful
