#include <brimful/ladder/checkpoint_sequential.h>

#include <utility>
#include <vector>

namespace brimful {
namespace {
/// Layers that are called one behind the other, and are one module to checkpoint(): it knows their tensors by name.
struct Segment {
  std::vector<torch::nn::AnyModule> layers;
  std::shared_ptr<torch::nn::SequentialImpl> model;

  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = layer.forward(std::move(x));
    }
    return x;
  }
  auto named_parameters() const { return model->named_parameters(); }
  auto named_buffers() const { return model->named_buffers(); }
};
}  // namespace

at::Tensor checkpoint_sequential(const torch::nn::Sequential& model, int64_t segments,
                                 at::Tensor input, const CheckpointOptions& options) {
  const auto layers = static_cast<int64_t>(model->size());
  TORCH_CHECK_VALUE(segments > 0 && segments <= layers,
                    "segments must be from 1 to the model's layers (segments: ", segments,
                    ", layers: ", layers, ")");
  for (int64_t i = 0; i < segments; ++i) {
    const auto segment = std::make_shared<Segment>();
    segment->model = model.ptr();
    segment->layers.assign(model->begin() + i * layers / segments,
                           model->begin() + (i + 1) * layers / segments);
    input = i + 1 < segments ? checkpoint(options, segment, std::move(input))
                             : segment->forward(std::move(input));
  }
  return input;
}

}  // namespace brimful
