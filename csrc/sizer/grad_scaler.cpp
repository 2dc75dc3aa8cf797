#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/distinct_tensors.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace brimful {
namespace {

/// Tensors that one kernel call takes.
struct Together {
  c10::Device device;
  c10::ScalarType dtype;
  std::vector<at::Tensor> tensors;
};

std::vector<Together> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<Together> all;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) {
      continue;
    }
    TORCH_CHECK_VALUE(gradient.scalar_type() != at::kHalf,
                      "float16 gradients cannot be unscaled without losing them (shape: ",
                      gradient.sizes(), "); keep the parameters in float32 and use Autocast");
    const auto values = gradient.is_sparse() ? gradient._values() : gradient;
    auto found = std::find_if(all.begin(), all.end(), [&](const Together& some) {
      return some.device == values.device() && some.dtype == values.scalar_type();
    });
    if (found == all.end()) {
      found = all.insert(all.end(), {values.device(), values.scalar_type(), {}});
    }
    found->tensors.push_back(values);
  }
  return all;
}

at::TensorOptions on(c10::Device device, c10::ScalarType dtype) {
  return at::TensorOptions().device(device).dtype(dtype);
}

void check(const GradScalerOptions& options) {
  TORCH_CHECK_VALUE(std::isfinite(options.init_scale) && options.init_scale > 0,
                    "the scale must be finite and positive (scale: ", options.init_scale,
                    "); torch begins with 65536");
  TORCH_CHECK_VALUE(std::isfinite(options.growth_factor) && options.growth_factor > 1,
                    "the scale must grow (growth_factor: ", options.growth_factor,
                    "); give a factor above 1");
  TORCH_CHECK_VALUE(options.backoff_factor > 0 && options.backoff_factor < 1,
                    "the scale must shrink (backoff_factor: ", options.backoff_factor,
                    "); give a factor between 0 and 1");
  TORCH_CHECK_VALUE(options.growth_interval > 0,
                    "the scale grows after a number of steps (growth_interval: ",
                    options.growth_interval, "); give a positive one");
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  check(options_);
}

GradScaler::GradScaler(at::Tensor scale, at::Tensor growth_tracker)
    : scale_(std::move(scale)), growth_tracker_(std::move(growth_tracker)) {}

std::pair<at::Tensor, at::Tensor> GradScaler::tensors(c10::Device device) {
  if (options_.enabled && !scale_.defined()) {
    scale_ = at::full({}, options_.init_scale, on(device, at::kFloat));
    growth_tracker_ = at::full({}, first_tracker_, on(device, at::kInt));
  }
  return {scale_, growth_tracker_};
}

void GradScaler::require_scale(const char* call) const {
  TORCH_CHECK(scale_.defined(), call, " came before the first scale(); scale the loss first");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!options_.enabled) {
    return outputs;
  }
  tensors(outputs.device());
  return outputs * scale_.to(outputs.device(), /*non_blocking=*/true);
}

void GradScaler::unscale_gradients(const void* optimizer,
                                   const std::vector<at::Tensor>& parameters) {
  if (!options_.enabled) {
    return;
  }
  require_scale("unscale()");
  auto& checked = optimizers_[optimizer];
  TORCH_CHECK(checked.stage != Stage::unscaled,
              "unscale() was called twice for an optimizer; call update() after its step()");
  TORCH_CHECK(checked.stage != Stage::stepped,
              "unscale() was called after the optimizer's step(); call update() before");
  const at::NoGradGuard no_grad;
  // The reciprocal in float64, as torch's: in float32 compilers differ.
  const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  std::vector<at::Tensor> found_inf;
  for (const auto& some : gradients_of(distinct_tensors(parameters))) {
    auto found = std::find_if(found_inf.begin(), found_inf.end(),
                              [&](const auto& flag) { return flag.device() == some.device; });
    if (found == found_inf.end()) {
      found = found_inf.insert(found_inf.end(), at::zeros({}, on(some.device, at::kFloat)));
    }
    at::_amp_foreach_non_finite_check_and_unscale_(some.tensors, *found,
                                                   inverse.to(some.device, /*non_blocking=*/true));
  }
  checked = {Stage::unscaled, std::move(found_inf)};
}

bool GradScaler::step_if_finite(const void* optimizer, const std::vector<at::Tensor>& parameters,
                                const std::function<void()>& step) {
  if (!options_.enabled) {
    step();
    return true;
  }
  require_scale("step()");
  auto& checked = optimizers_[optimizer];
  TORCH_CHECK(checked.stage != Stage::stepped,
              "step() was called twice for an optimizer; call update() between");
  if (checked.stage == Stage::ready) {
    unscale_gradients(optimizer, parameters);
  }
  if (checked.found_inf.empty()) {
    optimizers_.erase(optimizer);  // the call may be repeated with gradients
    TORCH_CHECK(false,
                "no parameter of the optimizer has a gradient (parameters: ", parameters.size(),
                "); call backward() on the scaled loss first");
  }
  const bool finite =
      std::all_of(checked.found_inf.begin(), checked.found_inf.end(),
                  [](const auto& flag) { return flag.template item<float>() == 0; });
  if (finite) {
    step();
  }
  checked.stage = Stage::stepped;
  return finite;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  require_scale("update()");
  if (new_scale) {
    TORCH_CHECK_VALUE(std::isfinite(*new_scale) && *new_scale > 0,
                      "the scale must be finite and positive (new_scale: ", *new_scale, ")");
    scale_.fill_(*new_scale);
  } else {
    at::Tensor found;
    for (const auto& [optimizer, checked] : optimizers_) {
      for (const auto& flag : checked.found_inf) {
        const auto here = flag.to(scale_.device(), /*non_blocking=*/true);
        found = found.defined() ? found + here : here;
      }
    }
    TORCH_CHECK(found.defined(), "update() came before any unscale() or step(); call step() first");
    at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
  }
  optimizers_.clear();
}

double GradScaler::scale_factor() const {
  return !options_.enabled  ? 1
         : scale_.defined() ? static_cast<double>(scale_.item<float>())
                            : options_.init_scale;
}

int64_t GradScaler::growth_tracker() const {
  return growth_tracker_.defined() ? growth_tracker_.item<int>() : first_tracker_;
}

std::map<std::string, double> GradScaler::state() const {
  if (!options_.enabled) {
    return {};
  }
  return {{"scale", scale_factor()},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", static_cast<double>(options_.growth_interval)},
          {"_growth_tracker", static_cast<double>(growth_tracker())}};
}

void GradScaler::load_state(const std::map<std::string, double>& state) {
  if (!options_.enabled) {
    return;
  }
  const auto get = [&](const char* name) {
    const auto found = state.find(name);
    TORCH_CHECK_VALUE(found != state.end(), "the scaler's state lacks an entry (name: ", name,
                      "); load what state() of an enabled scaler gave");
    return found->second;
  };
  const GradScalerOptions loaded{get("scale"), get("growth_factor"), get("backoff_factor"),
                                 static_cast<int64_t>(get("growth_interval")), true};
  check(loaded);
  const auto tracker = get("_growth_tracker");
  TORCH_CHECK_VALUE(tracker >= 0 && tracker <= loaded.growth_interval,
                    "the scaler's state counts steps that cannot be (_growth_tracker: ", tracker,
                    ", growth_interval: ", loaded.growth_interval, ")");
  options_ = loaded;
  first_tracker_ = static_cast<int64_t>(tracker);
  if (scale_.defined()) {
    scale_.fill_(loaded.init_scale);
    growth_tracker_.fill_(first_tracker_);
  }
}

}  // namespace brimful
