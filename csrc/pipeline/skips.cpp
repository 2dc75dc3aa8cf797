#include "pipeline/skips.h"

#include <ATen/ATen.h>
#include <brimful/pipeline/skip.h>

namespace brimful::pipeline {
namespace {
thread_local SkipScope* current = nullptr;

SkipScope& scope_of(const char* call) {
  TORCH_CHECK_VALUE(current != nullptr, call,
                    " belongs into a stage's forward (stage: none); call it from there");
  return *current;
}
}  // namespace

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

SkipScope::SkipScope(SkipBoard& board, int microbatch, c10::Device device)
    : board_(board), microbatch_(microbatch), device_(device), outer_(current) {
  current = this;
}

SkipScope::~SkipScope() {
  current = outer_;
}

void SkipScope::stash(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "there is nothing to stash (name: ", name, ")");
  board_.put(name, microbatch_, {left_at(tensor.detach()), tensor.requires_grad()});
  if (tensor.requires_grad()) {
    stashed.push_back({name, tensor});
  }
}

at::Tensor SkipScope::pop(const std::string& name) {
  auto parcel = board_.take(name, microbatch_);
  const auto own = std::find_if(stashed.begin(), stashed.end(),
                                [&](const auto& parcel) { return parcel.name == name; });
  if (own != stashed.end()) {  // of this very stage: its graph goes on
    auto whole = std::move(own->tensor);
    stashed.erase(own);
    return whole;
  }
  auto tensor = board_.lanes().fetch(std::move(parcel.message), device_);
  if (parcel.needs_gradient) {
    tensor.set_requires_grad(true);
    popped.push_back({name, tensor});
  }
  return tensor;
}

void stash(const std::string& name, const at::Tensor& tensor) {
  scope_of("stash").stash(name, tensor);
}

at::Tensor pop(const std::string& name) {
  return scope_of("pop").pop(name);
}

}  // namespace brimful::pipeline
