#pragma once
#include <ATen/core/grad_mode.h>
#include <brimful/pipeline/stage.h>

#include <algorithm>

namespace brimful::pipeline {

/// A stage of a package of AOTInductor (torch._inductor.aoti_compile_and_package): a pointer to a
/// torch::inductor::AOTIModelPackageLoader, or to what else has run() from tensors to tensors. It is kept alive. Its
/// parameters are inside it, and it has no backward: for inference, or as a first stage that is not trained.
/// In a step it throws c10::ValueError where a gradient would have to go through it.
template <typename Package>
requires requires(Package& package, const std::vector<at::Tensor>& inputs) {
  { package->run(inputs) } -> std::convertible_to<std::vector<at::Tensor>>;
}
Stage package_stage(Package package, std::string name = "") {
  auto call = [package](const std::vector<at::Tensor>& inputs) -> std::vector<at::Tensor> {
    const bool has_gradients =
        at::GradMode::is_enabled() &&
        std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
          return input.defined() && input.requires_grad();
        });
    TORCH_CHECK_VALUE(!has_gradients,
                      "a package has no backward, and its input needs a gradient; give the module "
                      "itself, or call forward()");
    return package->run(inputs);
  };
  return make_stage(std::move(call), {}, {}, std::move(name));
}

}  // namespace brimful::pipeline
