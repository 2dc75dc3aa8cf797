#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/transaction.h>

#include <algorithm>
#include <unordered_map>

#include "step/copy_each.h"

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
    : devices_(std::move(devices)) {
  const c10::Device cpu(c10::DeviceType::CPU);
  std::erase(devices_, cpu);
  devices_.push_back(cpu);
  hold(std::move(buffers));
}

void Transaction::hold(std::vector<at::Tensor> buffers) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;
  std::unordered_map<const c10::TensorImpl*, at::Tensor>
      made;  // one that a module lists twice has one copy
  for (size_t i = 0; i < buffers.size(); ++i) {
    auto& copy = made[buffers[i].unsafeGetTensorImpl()];
    if (copy.defined()) {
      copies.push_back(copy);
      continue;
    }
    const bool known = i < buffers_.size() && buffers[i].is_same(buffers_[i]) &&
                       buffers[i].sizes() == copies_[i].sizes() &&
                       buffers[i].dtype() == copies_[i].dtype();
    copy = known ? copies_[i] : at::empty_like(buffers[i]);
    copies.push_back(copy);
  }
  buffers_ = std::move(buffers);
  copies_ = std::move(copies);
  versions_.resize(buffers_.size());
}

void Transaction::follow(std::function<std::vector<at::Tensor>()> buffers) {
  current_ = std::move(buffers);
  hold(current_());
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
  if (current_) {
    hold(current_());
  }
  copy_each(copies_, buffers_);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    versions_[i] = buffers_[i]._version();
  }
  for (const auto& keeper : keepers_) {
    keeper.capture();
  }
}

void Transaction::restore_others() {
  for (size_t i = 0; i < devices_.size(); ++i) {
    set_generator_state(devices_[i], generator_states_[i]);
  }
  for (const auto& keeper : keepers_) {
    keeper.restore();
  }
  if (current_) {
    restore_replaced();
  }
}

void Transaction::rewind() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  restore_others();
  copy_each(buffers_, copies_);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    versions_[i] = buffers_[i]._version();
  }
}

void Transaction::restore() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  restore_others();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i]._version() != versions_[i] || !at::equal(buffers_[i], copies_[i])) {
      buffers_[i].copy_(copies_[i]);
      versions_[i] = buffers_[i]._version();
    }
  }
}

// In a module of C++ the tensor that it had cannot be put back.
void Transaction::restore_replaced() {
  const auto now = current_();
  for (size_t i = 0; i < std::min(now.size(), buffers_.size()); ++i) {
    if (!now[i].is_same(buffers_[i])) {
      now[i].set_data(copies_[i].clone());
    }
  }
}

}  // namespace brimful
