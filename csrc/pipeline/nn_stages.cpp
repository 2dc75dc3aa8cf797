#include <brimful/pipeline/nn_stages.h>
#include <brimful/sizer/batch_norms.h>
#include <brimful/step/distinct_tensors.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <numeric>

namespace brimful::pipeline {
namespace {
/// Tensors of TorchScript's modules that are no parameters, and places that hold None.
class ScriptNames final : public TensorNames {
 public:
  explicit ScriptNames(torch::jit::Module module) : module_(std::move(module)) {}

  std::shared_ptr<const Moment> now() override {
    auto values = std::make_shared<Values>();
    for (const auto& buffer : module_.buffers()) {
      values->buffers.push_back(buffer);
    }
    values->buffers = distinct_tensors(std::move(values->buffers));
    for (const auto& module : module_.modules()) {
      const auto object = module._ivalue();
      for (size_t slot = 0; slot < object->type()->numAttributes(); ++slot) {
        const auto& value = object->getSlot(slot);
        if (!object->type()->is_parameter(slot) && (value.isTensor() || value.isNone())) {
          values->all.push_back({object, slot, value});
        }
      }
    }
    return values;
  }
  bool put_back(const Moment& moment, const Instead& instead) override {
    for (const auto& [object, slot, value] : dynamic_cast<const Values&>(moment).all) {
      const auto found =
          value.isTensor() ? instead.find(value.toTensor().unsafeGetTensorImpl()) : instead.end();
      object->setSlot(slot, found == instead.end() ? value : c10::IValue(found->second));
    }
    return true;
  }

 private:
  struct Place {
    c10::intrusive_ptr<c10::ivalue::Object> object;
    size_t slot;
    c10::IValue value;
  };
  struct Values final : Moment {
    std::vector<Place> all;
  };
  torch::jit::Module module_;
};
}  // namespace

std::shared_ptr<TensorNames> detail::names_in(const torch::jit::Module& module) {
  return std::make_shared<ScriptNames>(module);
}

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
