#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/transaction.h>

#include <utility>

namespace brimful {
namespace {
at::Tensor generator_state(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(c10::Device device, const at::Tensor& state) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}
}  // namespace

Transaction::Transaction(std::vector<at::Tensor> buffers, std::vector<c10::Device> devices)
    : buffers_(std::move(buffers)), state_(buffers_, nullptr), devices_(std::move(devices)) {
  const c10::Device cpu(c10::DeviceType::CPU);
  std::erase(devices_, cpu);
  devices_.push_back(cpu);
}

void Transaction::follow(std::shared_ptr<TensorNames> names) {
  state_ = ForwardState(buffers_, std::move(names));
}

void Transaction::follow(std::function<std::vector<at::Tensor>()> buffers) {
  follow(names_of(std::move(buffers)));
}

void Transaction::add(Keeper keeper) {
  keepers_.push_back(std::move(keeper));
}

void Transaction::capture() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  generator_states_.clear();
  for (const auto device : devices_) {
    generator_states_.push_back(generator_state(device));
  }
  state_.capture();
  for (const auto& keeper : keepers_) {
    keeper.capture();
  }
}

void Transaction::restore_others() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < devices_.size(); ++i) {
    set_generator_state(devices_[i], generator_states_[i]);
  }
  for (const auto& keeper : keepers_) {
    keeper.restore();
  }
}

void Transaction::rewind() {
  restore_others();
  state_.rewind();
}

void Transaction::restore() {
  restore_others();
  state_.restore();
}

}  // namespace brimful
