// What a step refuses: losses and gradients that are not what it could work with.
#include <ATen/ATen.h>
#include <brimful/memory/stats.h>
#include <brimful/step/step.h>

#include <cmath>
#include <optional>

#include "step/each_parameter.h"

namespace brimful {
namespace {
bool has_nonzero(const at::Tensor& gradient) {
  const auto values = gradient.is_sparse() ? gradient._values() : gradient;
  return at::any(values != 0).item<bool>();
}
}  // namespace

void require_loss(const PieceLoss& piece) {
  TORCH_CHECK_TYPE(
      piece.loss.defined(),
      "the loss function returned no tensor; return the mean loss, or (mean loss, weight)");
  TORCH_CHECK_VALUE(piece.loss.numel() == 1,
                    "the loss is not a scalar (shape: ", piece.loss.sizes(),
                    "); return its mean over the piece");
  TORCH_CHECK_TYPE(!piece.loss.is_complex(), "the loss is complex (dtype: ", piece.loss.dtype(),
                   "); return a real one, such as its real part");
  TORCH_CHECK_VALUE(std::isfinite(piece.weight) && piece.weight >= 0,
                    "the weight of a piece must be finite and not negative (weight: ", piece.weight,
                    ")");
  TORCH_CHECK_VALUE(piece.weight == 0 || piece.loss.requires_grad(),
                    "the loss needs no gradient (requires_grad: false); compute it from the "
                    "model's output outside no_grad");
}

void StepGroup::require_empty_gradients() {
  const memory::Unlimited unlimited;
  const auto require_empty = [](const at::Tensor& parameter) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      return;
    }
    TORCH_CHECK_VALUE(!has_nonzero(gradient),
                      "a gradient is not empty at the step's start (shape: ", parameter.sizes(),
                      "); call optimizer.zero_grad() before every step");
    gradient.reset();
  };
  for_each_parameter(participants_, outside_, require_empty);
}

void StepGroup::require_one_device() const {
  std::optional<c10::Device> device;
  const auto check = [&](const at::Tensor& parameter) {
    if (!device) {
      device = parameter.device();
    }
    TORCH_CHECK_VALUE(*device == parameter.device(),
                      "the model's parameters are on several devices (devices: ", *device, " and ",
                      parameter.device(),
                      "); move them to one, or give each device's modules a process of their own");
  };
  for_each_parameter(participants_, outside_, check);
}

void StepGroup::require_no_backward() const {
  for_each_parameter(participants_, outside_, [](const at::Tensor& parameter) {
    TORCH_CHECK_VALUE(
        !parameter.grad().defined(),
        "the loss function ran backward itself, and its gradients would count twice (a parameter "
        "has one, shape: ",
        parameter.sizes(), "); only return the loss: the step runs backward");
  });
}

}  // namespace brimful
