#include "pipeline/executor/skips_outside.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>

#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace brimful::pipeline {
namespace {
using Tensors = std::map<std::string, at::Tensor>;

/// What checkpoints will pop again, by the thread of their forward: a device's backward runs on another one.
class Kept {
 public:
  void put(const std::string& name, at::Tensor tensor) {
    const std::lock_guard lock(mutex_);
    kept_[name][std::this_thread::get_id()] = std::move(tensor);
  }
  /// What was kept for the forward before is dropped.
  void begin(const std::string& name, bool recorded) {
    const std::lock_guard lock(mutex_);
    recorded ? unrecorded_.erase(name) : unrecorded_.insert(name).second;
    const auto found = kept_.find(name);
    if (found != kept_.end()) {
      found->second.erase(std::this_thread::get_id());
    }
  }
  /// Whether it was last stashed where autograd records nothing.
  bool is_unrecorded(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return unrecorded_.count(name) > 0;
  }
  void drop_thread() {
    const std::lock_guard lock(mutex_);
    for (auto& [name, by_thread] : kept_) {
      by_thread.erase(std::this_thread::get_id());
    }
  }
  at::Tensor find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto& by_thread = kept_[name];
    const auto own = by_thread.find(std::this_thread::get_id());
    const bool found = own != by_thread.end() || by_thread.size() == 1;
    TORCH_CHECK_VALUE(found,
                      "a checkpoint's second forward pops a tensor that is not kept (name: ", name,
                      ", threads: ", by_thread.size(),
                      "); checkpoint with use_reentrant=False, and give each thread's model names "
                      "of its own");
    return (own != by_thread.end() ? own : by_thread.begin())->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::map<std::thread::id, at::Tensor>> kept_;
  std::set<std::string> unrecorded_;
};

Kept& kept() {
  static auto* all = new Kept;  // threads may end after it would
  return *all;
}

struct Stashed {
  ~Stashed() { kept().drop_thread(); }
  Tensors tensors;
};

Tensors& stashed() {
  thread_local Stashed own;
  return own.tensors;
}
}  // namespace

void stash_outside(const std::string& name, const at::Tensor& tensor, bool again) {
  if (again) {
    TORCH_CHECK_VALUE(
        !tensor.defined() || !tensor.requires_grad() || !kept().is_unrecorded(name),
        "what a reentrant checkpoint stashes gets no gradient outside a pipeline (name: ", name,
        "); checkpoint with use_reentrant=False");
    return;  // its graph is that of the first time
  }
  kept().begin(name, at::GradMode::is_enabled());
  stashed()[name] = tensor;  // what an error has left is replaced
}

at::Tensor pop_outside(const std::string& name, bool again) {
  if (again) {
    return kept().find(name);
  }
  const auto found = stashed().find(name);
  TORCH_CHECK_VALUE(found != stashed().end(),
                    "no earlier layer has stashed a tensor of this name (name: ", name,
                    "); stash it before, and pop it once");
  auto tensor = std::move(found->second);
  stashed().erase(found);
  // Torch's checkpoints hook into what is saved.
  if (at::GradMode::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) {
    kept().put(name,
               tensor.defined() ? tensor.detach().requires_grad_(tensor.requires_grad()) : tensor);
  }
  return tensor;
}

}  // namespace brimful::pipeline
