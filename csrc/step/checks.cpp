// What a step refuses: losses and gradients that are not what it could work with.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/step.h>

#include <cmath>
#include <limits>
#include <optional>

#include "step/copy_each.h"
#include "step/each_parameter.h"

namespace brimful {
namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The values' largest magnitudes say it, with one wait for all of a device and dtype.
std::optional<size_t> first_nonzero(const std::vector<at::Tensor>& values) {
  std::optional<size_t> first;
  for_each_kind(values, [&](const std::vector<size_t>& places) {
    std::vector<at::Tensor> together;
    together.reserve(places.size());
    for (const auto i : places) {
      together.push_back(values[i]);
    }
    const auto largest = at::stack(at::_foreach_norm(together, kInfinity));
    const auto nonzero = at::ne(largest, 0).to(at::kCPU);
    for (size_t k = 0; k < places.size() && places[k] < first.value_or(values.size()); ++k) {
      if (nonzero.const_data_ptr<bool>()[k]) {
        first = places[k];
      }
    }
  });
  return first;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) {
      gradients.push_back(parameter.grad());
    }
  }
  return gradients;
}

void require_one_weight(const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.numel() == 1 && !weight.is_complex(),
                    "the weight of a piece is no number (shape: ", weight.sizes(),
                    ", dtype: ", weight.dtype(), "); return a sum or a count of one element");
}
}  // namespace

PieceLoss with_known_weight(PieceLoss piece) {
  if (piece.late_weight.defined()) {
    require_one_weight(piece.late_weight);
    const memory::Unlimited unlimited;
    piece.weight = piece.late_weight.detach().to(at::kDouble).item<double>();
    piece.late_weight.reset();
  }
  return piece;
}

void require_loss(const PieceLoss& piece) {
  TORCH_CHECK_TYPE(
      piece.loss.defined(),
      "the loss function returned no tensor; return the mean loss, or (mean loss, weight)");
  TORCH_CHECK_VALUE(piece.loss.numel() == 1,
                    "the loss is not a scalar (shape: ", piece.loss.sizes(),
                    "); return its mean over the piece");
  TORCH_CHECK_TYPE(!piece.loss.is_complex(), "the loss is complex (dtype: ", piece.loss.dtype(),
                   "); return a real one, such as its real part");
  const bool is_late = piece.late_weight.defined();
  if (is_late) {
    require_one_weight(piece.late_weight);
  }
  TORCH_CHECK_VALUE(std::isfinite(piece.weight) && piece.weight >= 0,
                    "the weight of a piece must be finite and not negative (weight: ", piece.weight,
                    ")");
  TORCH_CHECK_VALUE((piece.weight == 0 && !is_late) || piece.loss.requires_grad(),
                    "the loss needs no gradient (requires_grad: false); compute it from the "
                    "model's output outside no_grad");
}

std::vector<at::Tensor> Participant::gradients() const {
  return gradients_of(parameters());
}

void StepGroup::require_empty_gradients() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  auto gradients = gradients_of(outside_);
  for (const auto& participant : participants_) {
    const auto theirs = participant->gradients();
    gradients.insert(gradients.end(), theirs.begin(), theirs.end());
  }
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> owners;
  for (const auto& gradient : gradients) {
    auto own = gradient.is_sparse() ? gradient._values() : gradient;
    if (own.numel() > 0) {
      values.push_back(std::move(own));
      owners.push_back(gradient);
    }
  }
  const auto nonzero = first_nonzero(values);
  TORCH_CHECK_VALUE(
      !nonzero, "a gradient is not empty at the step's start (shape: ", owners[*nonzero].sizes(),
      "); call optimizer.zero_grad() after optimizer.step(), or pass accumulate=True to add to the "
      "gradients");
  for_each_parameter(participants_, outside_,
                     [](const at::Tensor& parameter) { parameter.mutable_grad().reset(); });
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

bool follow_group(const StepGroup& group) {
  bool followed = false;
  for (const auto& participant : group.participants()) {
    followed = participant->follow_group() || followed;
  }
  if (followed) {
    group.require_one_group();
  }
  return followed;
}

}  // namespace brimful
