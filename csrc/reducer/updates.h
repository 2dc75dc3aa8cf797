#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reducer/late_flags.h"

namespace brimful {

/// Values of ControlRecord::updated.
constexpr uint8_t kNotUpdated = 0;
constexpr uint8_t kUpdated = 1;
constexpr uint8_t kUpdateUnknown = 2;
constexpr uint8_t kUpdateNotCompared = 3;
/// The same of all parameters, whether the bytes are of parameters or of steps (LateFlags).
constexpr uint8_t kAllUnknown = 0xAA;
constexpr uint8_t kNoneCompared = 0xFF;

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
  /// What was found goes into later records, when it is on the host: nothing waits for the device.
  void be_late();

  /// Returns for ControlRecord::updated a byte by watched parameter, on the device: undefined where there is nothing to
  /// compare with, and if it is late. Then `flags` are those of the last steps. Does not wait for the device.
  at::Tensor look(std::array<uint8_t, 8>& flags);

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
  /// What a step has seen, and the gradients that it gave.
  struct Moment {
    at::Tensor values;
    at::Tensor gradients;
    std::vector<uint32_t> versions;
    bool gradients_known = false;
  };
  Moment& at_step(int64_t step) { return moments_[step % std::ssize(moments_)]; }
  Moment& now() { return at_step(stood_); }
  Moment& before() { return at_step(stood_ - 1 + std::ssize(moments_)); }
  void make_moments(size_t count);
  at::Tensor compare();
  void mark_idle();
  void take_looked();
  /// Of all that the ranks must have had alike before the step, to be alike in it.
  uint64_t premises(int64_t step);
  /// The ranks differ as of this step; none: they may go on to.
  void compare_all(const std::vector<ControlRecord>& records, std::optional<int64_t> step,
                   const Exchange& exchange);

  std::vector<at::Tensor> parameters_;
  c10::Device device_;
  std::string owner_;
  std::vector<size_t> watched_;
  std::vector<Moment> moments_;  ///< of the last steps that stood, and of the one that looks
  int64_t stood_ = 0;            ///< steps
  std::optional<LateFlags> late_;
  at::Tensor no_values_;  ///< zeros
  at::Tensor differs_;
  at::Tensor changed_;
  at::Tensor idle_;
  at::Tensor updated_;
  bool can_compare_ = false;  ///< before() is of a step that stood
  bool looked_ = false;
  std::string how_;         ///< the ranks came to differ
  std::string updated_on_;  ///< " (rank 0)", where some ranks did nothing else
  std::string divergence_;
};

}  // namespace brimful
