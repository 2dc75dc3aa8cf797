#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/late_sums.h>

#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "memory/host_tensor.h"
#include "step/sums_of.h"

namespace brimful {

/// Float64 of a device, read once.
class LateSums::Column {
 public:
  explicit Column(const at::Tensor& values) : host_(std::in_place, values) {}

  /// False if the device has not come so far. Waits for nothing.
  bool take() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto* const come = host_ ? host_->if_come() : nullptr) {
      read(*come);
    }
    return !host_;
  }
  const std::vector<double>& get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (host_) {
      read(host_->get());
    }
    return values_;
  }
  double sum() const {
    const auto& all = get();
    return std::accumulate(all.begin(), all.end(), 0.0);
  }

 private:
  void read(const at::Tensor& host) const {
    const auto* const first = host.const_data_ptr<double>();
    values_.assign(first, first + host.numel());
    host_.reset();
  }

  mutable std::mutex mutex_;
  mutable std::optional<memory::ValuesOnHost> host_;  ///< nothing once it is read
  mutable std::vector<double> values_;
};

LateSums::LateSums(const at::Tensor& losses, const at::Tensor& weights, double known_weight)
    : losses_(std::make_unique<Column>(losses)),
      weights_(weights.defined() ? std::make_unique<Column>(weights) : nullptr),
      device_weights_(weights),
      known_weight_(known_weight) {}

LateSums::~LateSums() = default;

at::Tensor LateSums::device_weight() const {
  TORCH_INTERNAL_ASSERT(device_weights_.defined());
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  return device_weights_.sum() + known_weight_;
}

bool LateSums::take() const {
  return losses_->take() && (!weights_ || weights_->take());
}

const std::vector<double>& LateSums::losses() const {
  return losses_->get();
}

double LateSums::weight() const {
  return known_weight_ + (weights_ ? weights_->sum() : 0);
}

double LateSums::mean_loss() const {
  const double total = weight();
  return total > 0 ? losses_->sum() / total : 0;
}

std::shared_ptr<const LateSums> sums_of(const Announcement& said) {
  const bool is_late = said.late_weight.defined();
  return std::make_shared<LateSums>(said.loss_sum.reshape({1}),
                                    is_late ? said.late_weight.reshape({1}) : at::Tensor(),
                                    is_late ? 0 : said.record.weight);
}

}  // namespace brimful
