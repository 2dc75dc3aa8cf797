#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/late_losses.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>
#include <utility>

#include "memory/host_tensor.h"
#include "step/late_loss.h"

namespace brimful {

LateLosses::LateLosses(const at::Tensor& values, Read read)
    : arrived_(values.device().type()), read_(std::move(read)) {
  const memory::Unlimited unlimited;  // the step stands
  const at::NoGradGuard no_grad;
  host_ = memory::zeros_on_host(values.sizes(), values.scalar_type(), values.device());
  host_.copy_(values, /*non_blocking=*/true);
  arrived_.record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
}

const std::vector<double>& LateLosses::sums() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (host_.defined()) {
    arrived_.synchronize();
    sums_ = read_(host_);
    host_.reset();
  }
  return sums_;
}

std::shared_ptr<LateLosses> late_loss_of(const at::Tensor& loss_sum) {
  return std::make_shared<LateLosses>(loss_sum, [](const at::Tensor& host) {
    return std::vector<double>{*host.const_data_ptr<double>()};
  });
}

double MeanLoss::value() const {
  if (!sums_) {
    return value_;
  }
  const auto& sums = sums_->sums();
  return value_ > 0 ? std::accumulate(sums.begin(), sums.end(), 0.0) / value_ : 0;
}

}  // namespace brimful
