#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace brimful {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;        ///< of the scale after growth_interval steps without inf and NaN
  double backoff_factor = 0.5;     ///< of the scale after a step with them
  int64_t growth_interval = 2000;  ///< steps
  bool enabled = true;             ///< false: every call passes through
};

/// torch.amp.GradScaler for C++, equal to it step by step: keeps float16 gradients from vanishing by a factor on the
/// loss, and leaves out optimizer steps whose gradients are not finite.
///
///     scaler.scale(loss).backward();
///     scaler.unscale(optimizer);  // only to clip or to look at the gradients
///     scaler.step(optimizer);
///     scaler.update();
///
/// A BatchSizer scales by itself (BatchSizerOptions::scaler): leave scale() out. Reduced gradients are the same on all
/// ranks, and so is the scale. Not thread-safe. Only step, scale_factor and state wait for the device.
class BRIMFUL_API GradScaler {
 public:
  /// @throws c10::ValueError unless init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval > 0
  explicit GradScaler(GradScalerOptions options = {});
  /// Scales by another scaler's tensors (0-dim: float32 and int32), and leaves it to that one to change them.
  GradScaler(at::Tensor scale, at::Tensor growth_tracker);
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// `outputs` times the scale, on their device; the first call decides on which device the scale lives.
  at::Tensor scale(const at::Tensor& outputs);

  /// Divides the gradients by the scale, and looks for inf and NaN. Once per optimizer and update().
  /// @throws c10::ValueError for float16 gradients (keep parameters in float32); c10::Error out of this order
  template <typename Optimizer>
  void unscale(Optimizer& optimizer) {
    unscale_gradients(&optimizer, parameters_of(optimizer));
  }
  /// Unscales if that was not done, and calls optimizer.step() if all gradients are finite; returns whether it did.
  /// @throws as unscale(); c10::Error if no parameter has a gradient, or for a second call before update()
  template <typename Optimizer>
  bool step(Optimizer& optimizer) {
    return step_if_finite(&optimizer, parameters_of(optimizer), [&] { optimizer.step(); });
  }
  /// Adapts the scale to what the optimizers' gradients were since the last call, or sets it.
  /// @throws c10::ValueError unless `new_scale` is finite and positive; c10::Error if nothing was unscaled
  void update(std::optional<double> new_scale = {});

  /// The same for optimizers that are not torch's; `optimizer` is any address that distinguishes them.
  void unscale_gradients(const void* optimizer, const std::vector<at::Tensor>& parameters);
  bool step_if_finite(const void* optimizer, const std::vector<at::Tensor>& parameters,
                      const std::function<void()>& step);

  /// The scale and the growth tracker, which change in place; made on `device` if nothing made them before. Undefined
  /// where scaling is not enabled.
  std::pair<at::Tensor, at::Tensor> tensors(c10::Device device);

  /// 1 where scaling is not enabled.
  double scale_factor() const;
  bool enabled() const { return options_.enabled; }
  /// The entries of torch's state_dict under its names, to be taken after update(); empty where not enabled.
  std::map<std::string, double> state() const;
  /// @throws c10::ValueError if an entry is missing or makes no sense; nothing is changed then
  void load_state(const std::map<std::string, double>& state);

 private:
  enum class Stage : uint8_t { ready, unscaled, stepped };
  struct Checked {
    Stage stage = Stage::ready;
    std::vector<at::Tensor> found_inf;  ///< by device
  };

  template <typename Optimizer>
  static std::vector<at::Tensor> parameters_of(Optimizer& optimizer) {
    std::vector<at::Tensor> parameters;
    for (auto& group : optimizer.param_groups()) {
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    }
    return parameters;
  }
  void require_scale(const char* call) const;
  int64_t growth_tracker() const;

  GradScalerOptions options_;
  at::Tensor scale_;           ///< 0-dim float32; undefined before the first scale()
  at::Tensor growth_tracker_;  ///< 0-dim int32: steps since the scale changed
  int64_t first_tracker_ = 0;
  std::map<const void*, Checked> optimizers_;
};

}  // namespace brimful
