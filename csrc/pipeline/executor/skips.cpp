#include "pipeline/executor/skips.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <brimful/pipeline/skip.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "pipeline/executor/skips_outside.h"

namespace brimful::pipeline {
namespace {
thread_local SkipScope* current_scope = nullptr;
thread_local SkipsAgain* current_again = nullptr;

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<int64_t>(tensor._version()) : -1;
}

bool has_saving_hooks() {
  return !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

template <typename Parts>
auto find_named(Parts& parts, const std::string& name) {
  return std::find_if(parts.begin(), parts.end(),
                      [&](const auto& part) { return part.name == name; });
}
}  // namespace

at::Tensor changeable(const at::Tensor& leaf) {
  if (!leaf.defined() || !leaf.requires_grad() || !at::GradMode::is_enabled() ||
      leaf.layout() != at::kStrided || !leaf.has_storage() || leaf.is_nested() ||
      leaf.unsafeGetTensorImpl()->is_python_dispatch()) {
    return leaf;
  }
  auto same = at::_unsafe_view(leaf, leaf.sizes());
  // Who has saved the memory's values for a backward must learn that they have changed.
  torch::autograd::impl::set_version_counter(same, torch::autograd::impl::version_counter(leaf));
  return same;
}

void SkipBoard::put(const std::string& name, int microbatch, Parcel parcel) {
  const std::lock_guard lock(mutex_);
  const bool fresh = parcels_.emplace(Key{microbatch, name}, std::move(parcel)).second;
  TORCH_CHECK_VALUE(fresh,
                    "a tensor of this name was stashed in this microbatch already (name: ", name,
                    "); give each its own");
}

SkipBoard::Parcel SkipBoard::take(const std::string& name, int microbatch) {
  const std::lock_guard lock(mutex_);
  const auto found = parcels_.find({microbatch, name});
  if (found == parcels_.end()) {
    std::string names;
    for (const auto& [key, parcel] : parcels_) {
      names += key.first == microbatch ? (names.empty() ? "" : ", ") + key.second : "";
    }
    TORCH_CHECK_VALUE(false, "no earlier stage has stashed a tensor of this name (name: ", name,
                      ", there are: ", names.empty() ? "none" : names,
                      "); stash it in a stage before this one, and pop it once");
  }
  auto parcel = std::move(found->second);
  parcels_.erase(found);
  return parcel;
}

std::vector<std::pair<std::string, SkipBoard::Parcel>> SkipBoard::take_all(int microbatch) {
  const std::lock_guard lock(mutex_);
  const auto begin = parcels_.lower_bound({microbatch, ""});
  const auto end = parcels_.lower_bound({microbatch + 1, ""});
  std::vector<std::pair<std::string, Parcel>> all;
  for (auto at = begin; at != end; ++at) {
    all.emplace_back(at->first.second, std::move(at->second));
  }
  parcels_.erase(begin, end);
  return all;
}

void SkipBoard::end_forward(int microbatch) {
  const std::lock_guard lock(mutex_);
  for (auto at = parcels_.lower_bound({microbatch, ""});
       at != parcels_.end() && at->first.first == microbatch; ++at) {
    auto& parcel = at->second;
    parcel.version =
        parcel.version < 0 ? version_of(parcel.message.value.tensors[0]) : parcel.version;
  }
}

void SkipBoard::require_empty(int microbatch) {
  const std::lock_guard lock(mutex_);
  const auto left = parcels_.lower_bound({microbatch, ""});
  TORCH_CHECK_VALUE(left == parcels_.end() || left->first.first != microbatch,
                    "a tensor was stashed that no stage has popped (name: ", left->first.second,
                    "); pop it in a later stage, or leave the stash out");
}

void SkipBoard::put_gradient(const std::string& name, int microbatch, at::Tensor gradient) {
  auto message = left_at(std::move(gradient));
  const std::lock_guard lock(mutex_);
  gradients_[{microbatch, name}] = std::move(message);
}

at::Tensor SkipBoard::take_gradient(const std::string& name, int microbatch, c10::Device device) {
  std::unique_lock lock(mutex_);
  auto gradient = gradients_.extract({microbatch, name});
  lock.unlock();
  return gradient ? lanes_.fetch(std::move(gradient.mapped()), device) : at::Tensor();
}

void SkipBoard::clear() {
  const std::lock_guard lock(mutex_);
  parcels_.clear();
  gradients_.clear();
}

SkipScope::SkipScope(SkipBoard& board, SkipRecord& record, int microbatch, c10::Device device)
    : board_(board),
      record_(record),
      microbatch_(microbatch),
      device_(device),
      trains_(at::GradMode::is_enabled()),
      outer_(current_scope) {
  current_scope = this;
}

SkipScope::~SkipScope() {
  current_scope = outer_;
}

void SkipScope::stash(const std::string& name, const at::Tensor& tensor) {
  if (is_in_backward()) {
    return stash_again(name, tensor);
  }
  if (!tensor.defined()) {
    return board_.put(name, microbatch_, {left_at(tensor), false});
  }
  const bool recorded = tensor.requires_grad();
  const bool unrecorded = !recorded && trains_ && !at::GradMode::is_enabled() &&
                          (tensor.is_floating_point() || tensor.is_complex());
  board_.put(name, microbatch_, {left_at(tensor.detach()), recorded || unrecorded});
  if (recorded) {
    record_.stashed.push_back({name, tensor});
  } else if (unrecorded) {
    record_.unrecorded.push_back(name);
  }
}

// What a checkpoint that is not reentrant stashes again has a graph already, which the backward began with. A reentrant one
// makes it now, and goes on to its outputs' part of it: this one's comes before.
void SkipScope::stash_again(const std::string& name, const at::Tensor& tensor) {
  const auto& names = record_.unrecorded;
  if (!tensor.defined() || !tensor.requires_grad() ||
      std::find(names.begin(), names.end(), name) == names.end()) {
    return;
  }
  at::Tensor gradient;
  const auto own = find_named(record_.popped, name);
  if (own == record_.popped.end()) {
    gradient = board_.take_gradient(name, microbatch_, device_);
  } else {
    gradient = std::exchange(own->tensor.mutable_grad(), at::Tensor());
    TORCH_CHECK_VALUE(
        gradient.defined(),
        "a stage pops what a reentrant checkpoint of its own has stashed, and the gradient comes "
        "too late for it (name: ",
        name, "); checkpoint with use_reentrant=False");
  }
  if (gradient.defined()) {
    torch::autograd::backward({tensor}, {gradient}, /*retain_graph=*/true);
  }
}

at::Tensor SkipScope::pop(const std::string& name) {
  if (is_in_backward()) {
    return pop_again(name);
  }
  auto parcel = board_.take(name, microbatch_);
  // Torch's checkpoints hook into what is saved, or record nothing at first.
  const bool repeats = trains_ && (!at::GradMode::is_enabled() || has_saving_hooks());
  const auto own = find_named(record_.stashed, name);
  if (own != record_.stashed.end()) {  // of this very stage: its graph goes on
    auto whole = std::move(own->tensor);
    record_.stashed.erase(own);
    if (repeats) {
      record_.again.push_back({name, whole});
    }
    return whole;
  }
  const auto& left = parcel.message.value.tensors[0];
  TORCH_CHECK_VALUE(
      !parcel.needs_gradient || parcel.version < 0 || version_of(left) == parcel.version,
      "a later stage has changed a tensor in place that was stashed (name: ", name,
      "); stash a clone of it, or use the out-of-place operation");
  auto tensor = board_.lanes().fetch(std::move(parcel.message), device_);
  if (repeats || (trains_ && record_.repeated)) {
    record_.again.push_back({name, tensor});
  }
  if (parcel.needs_gradient && trains_) {
    tensor.set_requires_grad(true);
    record_.popped.push_back({name, tensor});
  }
  return changeable(tensor);
}

at::Tensor SkipScope::pop_again(const std::string& name) const {
  for (const auto* parts : {&record_.again, &record_.popped}) {
    const auto found = find_named(*parts, name);
    if (found != parts->end()) {
      const auto& tensor = found->tensor;
      return tensor.defined() && tensor.is_leaf() ? changeable(tensor) : tensor;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "a forward that runs again in backward pops a tensor that the first one did not pop (name: ",
      name, "); checkpoint with torch.utils.checkpoint, whose forwards are alike");
}

SkipsAgain::SkipsAgain() : outer_(std::exchange(current_again, this)) {}

SkipsAgain::~SkipsAgain() {
  current_again = outer_;
}

void SkipsAgain::stash(const std::string& name, const at::Tensor& tensor) {
  own_.push_back({name, tensor});
}

at::Tensor SkipsAgain::pop(const std::string& name) {
  const auto own = find_named(own_, name);
  if (own == own_.end()) {
    TORCH_INTERNAL_ASSERT(current_scope != nullptr);
    return current_scope->pop_again(name);
  }
  auto tensor = std::move(own->tensor);
  own_.erase(own);
  return tensor;
}

std::vector<at::Tensor> SkipsAgain::stashed() const {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : own_) {
    if (tensor.defined() && tensor.requires_grad()) {
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

void stash(const std::string& name, const at::Tensor& tensor) {
  if (current_again != nullptr) {
    return current_again->stash(name, tensor);
  }
  current_scope != nullptr ? current_scope->stash(name, tensor)
                           : stash_outside(name, tensor, is_in_backward());
}

at::Tensor pop(const std::string& name) {
  if (current_again != nullptr) {
    return current_again->pop(name);
  }
  return current_scope != nullptr ? current_scope->pop(name) : pop_outside(name, is_in_backward());
}

}  // namespace brimful::pipeline
