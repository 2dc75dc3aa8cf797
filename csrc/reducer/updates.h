#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace brimful {

/// Finds out whether the ranks updated their parameters alike between two steps: a few values of a few parameters are
/// looked at in each step, and the ranks' records say which of them have changed. Values, not version counters: fused
/// optimizers and those of LibTorch change parameters behind these. Not thread-safe.
class Updates {
 public:
  /// Watches parameters on `device`. `renormalised` as in ReducerOptions.
  Updates(std::vector<at::Tensor> parameters, c10::Device device,
          const std::vector<bool>& renormalised = {});

  /// For ControlRecord::updated: 0/1 by watched parameter, on the device. Undefined where there is nothing to compare
  /// with. Allocates nothing, and does not wait for the device.
  at::Tensor look();

  using Exchange = std::function<std::vector<ControlRecord>(const ControlRecord&)>;
  /// A step has stood, in which all ranks looked. Where their records differ, or the parameters did before, all ranks
  /// compare all values, with one `exchange`.
  void settle(const std::vector<ControlRecord>& records, const Exchange& exchange);
  /// How the ranks' parameters differ; empty where they do not. Alike on all ranks.
  const std::string& divergence() const { return divergence_; }
  /// All ranks have the same parameters now.
  void forget();

 private:
  std::vector<at::Tensor> parameters_;
  c10::Device device_;
  std::vector<size_t> watched_;
  at::Tensor seen_;
  at::Tensor before_;
  at::Tensor differs_;
  at::Tensor updated_;
  bool can_compare_ = false;  ///< `before_` is that of a step that stood
  bool looked_ = false;
  std::string how_;         ///< the ranks came to differ
  std::string updated_on_;  ///< " (rank 0)", where some ranks did nothing else
  std::string divergence_;
};

}  // namespace brimful
