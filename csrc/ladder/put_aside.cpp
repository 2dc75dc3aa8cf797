// What a thread's operators save goes through the hooks of its engine of autograd: Python's has some, LibTorch's has none.
#include "ladder/put_aside.h"

#include <brimful/log.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace brimful::ladder {
namespace {
using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

thread_local std::vector<std::shared_ptr<Aside>> asides_in_scope;

class AsideHooks final : public SavedVariableHooks {
 public:
  explicit AsideHooks(std::shared_ptr<Aside> aside) : aside_(std::move(aside)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    saved_ = std::exchange(aside_, nullptr)->put(tensor);
    tensor_ = saved_ ? at::Tensor() : tensor.detach();
  }
  at::Tensor call_unpack_hook() override { return saved_ ? saved_->get() : tensor_; }

 private:
  std::shared_ptr<Aside> aside_;
  std::shared_ptr<SavedAside> saved_;
  at::Tensor tensor_;  ///< what cannot be put aside
};

class EngineWithHooks final : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    return asides_in_scope.empty() ? nullptr : std::make_unique<AsideHooks>(asides_in_scope.back());
  }
};

Engine& engine_with_hooks() {
  static auto* const engine = new EngineWithHooks;  // its threads may outlive what is static
  return *engine;
}

struct Scope {
  explicit Scope(std::shared_ptr<Aside> aside) { asides_in_scope.push_back(std::move(aside)); }
  ~Scope() { asides_in_scope.pop_back(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

std::shared_ptr<void> scope_of_engine(std::shared_ptr<Aside> aside) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (&Engine::get_default_engine() != &engine_with_hooks()) {
    TORCH_CHECK(
        &Engine::get_default_engine() == &Engine::get_base_engine(),
        "what a step saves cannot be put aside, since this process has an engine of "
        "autograd that is not LibTorch's; import brimful in Python, or leave offloading out");
    torch::autograd::set_default_engine_stub(&engine_with_hooks);
  }
  return std::make_shared<Scope>(std::move(aside));
}

AsideScope& aside_scope() {
  static auto* const make = new AsideScope(&scope_of_engine);
  return *make;
}
}  // namespace

bool can_put_aside(c10::Device device) {
  try {
    return !device.is_cpu() || ScratchFile::open() != nullptr;
  } catch (const c10::Error& error) {
    log(LogLevel::warning, std::string("one row does not fit, and nothing can be put aside: ") +
                               error.what_without_backtrace());
    return false;
  }
}

std::shared_ptr<void> put_aside_in_scope(std::shared_ptr<Aside> aside) {
  return aside_scope()(std::move(aside));
}

void set_aside_scope(AsideScope make) {
  aside_scope() = std::move(make);
}

}  // namespace brimful::ladder
