#include <ATen/ATen.h>
#include <brimful/pipeline/split_backward.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
namespace brimful::pipeline {
struct WeightWork::Left {};
WeightWork::WeightWork() noexcept = default;
WeightWork::~WeightWork() = default;
WeightWork::WeightWork(WeightWork&&) noexcept = default;
WeightWork& WeightWork::operator=(WeightWork&&) noexcept = default;
bool WeightWork::empty() const noexcept { return true; }
void WeightWork::run() {}
int64_t WeightWork::bytes() const { return 0; }
std::vector<at::Tensor> backward_full(const std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& gradients,
                                      const std::vector<at::Tensor>& inputs) {
  torch::autograd::edge_list roots;
  for (const auto& o : outputs) roots.push_back(torch::autograd::impl::gradient_edge(o));
  torch::autograd::Engine::get_default_engine().execute(roots, gradients, false, false, true);
  std::vector<at::Tensor> result;
  for (const auto& input : inputs) {
    result.push_back(std::move(input.mutable_grad()));
    input.mutable_grad().reset();
  }
  return result;
}
InputBackward backward_input(const std::vector<at::Tensor>& o, const std::vector<at::Tensor>& g,
                             const std::vector<at::Tensor>& i) {
  InputBackward result;
  result.input_gradients = backward_full(o, g, i);
  result.split = false;
  return result;
}
}  // namespace brimful::pipeline
