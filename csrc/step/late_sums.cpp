#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/late_sums.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <iterator>

#include "memory/host_tensor.h"
#include "step/sums_of.h"

namespace brimful {
namespace {
constexpr int64_t kFigures = 2;  // of a rank
}  // namespace

LateSums::LateSums(at::Tensor by_rank, double known_weight, bool weight_is_late)
    : by_rank_(std::move(by_rank)),
      known_weight_(known_weight),
      weight_is_late_(weight_is_late),
      arrived_(by_rank_.device().type()) {
  const memory::Unlimited unlimited;  // the step stands
  const at::NoGradGuard no_grad;
  const auto device = by_rank_.device();
  host_ = memory::zeros_on_host(by_rank_.sizes(), at::kDouble, device);
  host_.copy_(by_rank_, /*non_blocking=*/true);
  arrived_.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

at::Tensor LateSums::device_weight() const {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  return by_rank_.select(1, 1).sum() + known_weight_;
}

bool LateSums::have_come() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !host_.defined() || arrived_.query();
}

const std::vector<double>& LateSums::values() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (host_.defined()) {
    arrived_.synchronize();
    const auto* const first = host_.const_data_ptr<double>();
    values_.assign(first, first + host_.numel());
    host_.reset();
  }
  return values_;
}

std::vector<double> LateSums::losses() const {
  const auto& all = values();
  std::vector<double> losses;
  for (int64_t i = 0; i < std::ssize(all); i += kFigures) {
    losses.push_back(all[i]);
  }
  return losses;
}

double LateSums::weight() const {
  double total = known_weight_;
  if (weight_is_late_) {
    const auto& all = values();
    for (int64_t i = 1; i < std::ssize(all); i += kFigures) {
      total += all[i];
    }
  }
  return total;
}

double LateSums::mean_loss() const {
  double sum = 0;
  for (const auto loss : losses()) {
    sum += loss;
  }
  const double total = weight();
  return total > 0 ? sum / total : 0;
}

std::shared_ptr<const LateSums> sums_of(const Announcement& said) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  const bool is_late = said.late_weight.defined();
  const auto weight = is_late ? said.late_weight : at::zeros_like(said.loss_sum);
  return std::make_shared<LateSums>(at::stack({said.loss_sum, weight}).reshape({1, kFigures}),
                                    is_late ? 0 : said.record.weight, is_late);
}

}  // namespace brimful
