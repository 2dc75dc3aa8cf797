#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace brimful {

/// Values of ControlRecord::updated.
constexpr uint8_t kNotUpdated = 0;
constexpr uint8_t kUpdated = 1;
constexpr uint8_t kUpdateUnknown = 2;
constexpr uint8_t kUpdateNotCompared = 3;

/// Finds out whether the ranks updated their parameters alike between two steps: a few values of a few parameters are
/// looked at in each step, and the ranks' records say which of them have changed. Values, since fused optimizers and those
/// of LibTorch change parameters behind their version counters. That nothing was updated needs more: a gradient at these
/// values, an unmoved counter, and that all ranks had the same values and gradients there. Ranks whose parameters differ
/// on purpose have not. Not thread-safe.
class Updates {
 public:
  /// Watches parameters on `device`. `renormalised` as in ReducerOptions. `owner`: whose argument turns this off.
  Updates(std::vector<at::Tensor> parameters, c10::Device device,
          const std::vector<bool>& renormalised, std::string owner);

  /// For ControlRecord::updated: a byte by watched parameter, on the device. Undefined where there is nothing to compare
  /// with. Allocates nothing, and does not wait for the device.
  at::Tensor look();

  using Exchange = std::function<std::vector<ControlRecord>(const ControlRecord&)>;
  /// A step has stood, in which all ranks looked. Where their records differ, or the parameters did before, all ranks
  /// compare all values, with one `exchange`.
  void settle(const std::vector<ControlRecord>& records, const Exchange& exchange);
  /// Of the step that settle() was called for: the parameters have the gradients that all ranks get.
  void note_gradients();
  /// How the ranks' parameters differ; empty where they do not. Alike on all ranks.
  const std::string& divergence() const { return divergence_; }
  /// All ranks have the same parameters now.
  void forget();

 private:
  void mark_idle();
  void take_looked();
  uint64_t premises() const;

  std::vector<at::Tensor> parameters_;
  c10::Device device_;
  std::string owner_;
  std::vector<size_t> watched_;
  at::Tensor seen_;
  at::Tensor before_;
  at::Tensor gradients_;  ///< of the step of before_, if gradients_known_
  at::Tensor no_values_;  ///< zeros
  at::Tensor differs_;
  at::Tensor changed_;
  at::Tensor idle_;
  at::Tensor updated_;
  std::vector<uint32_t> versions_seen_;
  std::vector<uint32_t> versions_before_;
  bool can_compare_ = false;  ///< `before_` is that of a step that stood
  bool looked_ = false;
  bool gradients_known_ = false;
  std::string how_;         ///< the ranks came to differ
  std::string updated_on_;  ///< " (rank 0)", where some ranks did nothing else
  std::string divergence_;
};

}  // namespace brimful
