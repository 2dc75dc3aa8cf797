#pragma once
// Takes torch::nn's headers in; programs that have no BatchNorm can do without.
#include <brimful/sizer/batch_norm.h>
#include <torch/nn/modules/batchnorm.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace brimful {
namespace detail {
template <typename Norm>
bool add_batch_norm(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
                    std::vector<BatchNormModule>& found) {
  const auto norm = std::dynamic_pointer_cast<Norm>(module);
  if (!norm) {
    return false;
  }
  BatchNormModule made;
  made.name = name;
  made.state = [norm] {
    return BatchNormState{norm->is_training(), norm->options.track_running_stats(),
                          norm->options.momentum()};
  };
  made.set_momentum = [norm](std::optional<double> momentum) { norm->options.momentum(momentum); };
  made.buffers = [norm] {
    return BatchNormBuffers{norm->running_mean, norm->running_var, norm->num_batches_tracked};
  };
  found.push_back(std::move(made));
  return true;
}

inline std::vector<at::Tensor> statistics_in(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    if (buffer.value().defined() && buffer.value().is_floating_point() &&
        names_statistics(buffer.key())) {
      found.push_back(buffer.value());
    }
  }
  return found;
}

/// A module of another class that may keep running statistics.
inline void add_other_norm(const std::string& name,
                           const std::shared_ptr<torch::nn::Module>& module,
                           std::vector<BatchNormModule>& found) {
  if (statistics_in(*module).empty()) {
    return;
  }
  BatchNormModule made;
  made.name = name;
  made.state = [module] { return BatchNormState{module->is_training(), true, std::nullopt}; };
  made.statistics = [module] { return statistics_in(*module); };
  found.push_back(std::move(made));
}
}  // namespace detail

/// The BatchNorm modules in `module` and below, and those of other classes that may keep running statistics, for
/// BatchSizerOptions::batch_norms.
inline std::vector<BatchNormModule> batch_norms_of(torch::nn::Module& module) {
  std::vector<BatchNormModule> found;
  const auto add = [&](const std::string& name, const std::shared_ptr<torch::nn::Module>& item) {
    if (!detail::add_batch_norm<torch::nn::BatchNorm1dImpl>(name, item, found) &&
        !detail::add_batch_norm<torch::nn::BatchNorm2dImpl>(name, item, found) &&
        !detail::add_batch_norm<torch::nn::BatchNorm3dImpl>(name, item, found)) {
      detail::add_other_norm(name, item, found);
    }
  };
  std::unordered_set<const torch::nn::Module*> known;         // one may be registered in two places
  const bool is_shared = !module.weak_from_this().expired();  // else it cannot be named
  for (const auto& item : module.named_modules("", /*include_self=*/is_shared)) {
    if (known.insert(item.value().get()).second) {
      add(item.key(), item.value());
    }
  }
  return found;
}

}  // namespace brimful
