#pragma once
#include <brimful/reducer/reducer.h>
#include <brimful/step/oom.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brimful {

/// Data parallelism for a module of LibTorch: one replica a rank. In a plain loop gradients are the mean over ranks once
/// backward() has returned; under a BatchSizer they are the weighted mean over all samples of all ranks.
///   brimful::DistributedDataParallel model(std::make_shared<Net>(), group);
///   auto loss = criterion(model(x), y);
/// `Module` is a torch::nn::Module (or anything with named_parameters(), buffers() and forward()).
template <typename Module>
class DistributedDataParallel {
 public:
  /// A collective; see Reducer::create for its errors. Parameters that need no gradient stay out of it.
  DistributedDataParallel(std::shared_ptr<Module> module,
                          const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                          ReducerOptions options = {})
      : module_(std::move(module)) {
    std::vector<at::Tensor> parameters;
    for (const auto& item : module_->named_parameters()) {
      if (item.value().requires_grad()) {
        parameters.push_back(item.value());
        options.names.push_back(item.key());
      } else {
        options.frozen.push_back(item.value());
      }
    }
    options.forwards_announced = true;
    reducer_ = Reducer::create(std::move(parameters), module_->buffers(), group, options);
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    prepare_forward(*reducer_);
    reducer_->loop().require_data();
    auto output = module_->forward(std::forward<Args>(args)...);
    watch(output);
    reducer_->loop().forward_done();
    return output;
  }

  /// Runs `fn`, one step of a plain loop; if it throws, the other ranks raise too, with this rank's message.
  template <typename Fn>
  void step(Fn&& fn) {
    begin_scope(*reducer_);
    try {
      std::forward<Fn>(fn)();
    } catch (...) {
      const auto failure = failure_of(std::current_exception());
      reducer_->loop().end_scope_failed(failure.kind, failure.text);
      throw;
    }
    reducer_->loop().end_scope_ok();
  }

  /// See Reducer::regroup; the model's sizers need BatchSizer::regrouped() then.
  Regrouped regroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    const RegroupOptions& options = {}) {
    return reducer_->regroup(group, options);
  }

  Module* operator->() { return module_.get(); }
  const std::shared_ptr<Module>& module() const { return module_; }
  const std::shared_ptr<Reducer>& reducer() const { return reducer_; }

 private:
  void watch(const at::Tensor& output) { reducer_->loop().watch(output); }
  template <typename... T>
  void watch(const std::tuple<T...>& outputs) {
    std::apply([&](const auto&... output) { (watch(output), ...); }, outputs);
  }
  template <typename T>
  void watch(const std::vector<T>& outputs) {
    for (const auto& output : outputs) {
      watch(output);
    }
  }
  template <typename T>
  void watch(const T& /*other*/) {}  // the first gradient's hook begins the backward instead

  std::shared_ptr<Module> module_;
  std::shared_ptr<Reducer> reducer_;
};

}  // namespace brimful
