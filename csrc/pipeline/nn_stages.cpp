#include <brimful/pipeline/nn_stages.h>
#include <brimful/sizer/batch_norms.h>

#include <algorithm>
#include <numeric>

namespace brimful::pipeline {

std::vector<BatchNormModule> detail::batch_norms_in(torch::nn::Module& module) {
  return batch_norms_of(module);
}

std::vector<torch::nn::Sequential> split_sequential(const torch::nn::Sequential& model,
                                                    const std::vector<int64_t>& balance) {
  const auto layers = static_cast<int64_t>(model->size());
  const bool positive =
      std::all_of(balance.begin(), balance.end(), [](int64_t count) { return count > 0; });
  TORCH_CHECK_VALUE(positive && !balance.empty() &&
                        std::accumulate(balance.begin(), balance.end(), int64_t{0}) == layers,
                    "balance must be positive numbers that add up to the model's layers (balance: ",
                    at::IntArrayRef(balance), ", layers: ", layers, ")");
  const auto names = model->named_children().keys();
  std::vector<torch::nn::Sequential> stages;
  int64_t next = 0;
  for (const auto count : balance) {
    torch::nn::Sequential stage;
    stage->train(model->is_training());  // while it has no layers, whose modes are their own
    for (const auto end = next + count; next < end; ++next) {
      stage->push_back(names[next], *(model->begin() + next));
    }
    stages.push_back(std::move(stage));
  }
  return stages;
}

}  // namespace brimful::pipeline
