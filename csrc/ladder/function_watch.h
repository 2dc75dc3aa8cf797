#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ladder/inner_graph.h"
#include "ladder/surroundings.h"
#include "step/tensor_form.h"

namespace brimful::ladder {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// A tensor from outside that a function read, at that version. It does not keep it: it may be one of the function's outputs,
/// which keep the function.
struct ReadTensor {
  WeakTensor tensor;
  uint32_t version = 0;

  /// Undefined where it is gone.
  at::Tensor get() const;
};

/// Memory from outside that a function changed in place, such as BatchNorm's statistics, and its bytes from before.
struct ChangedStorage {
  WeakStorage storage;
  at::Tensor before;
};

/// A tensor from outside that a function changed, and how it lay in its storage before, which may have been smaller.
struct ChangedTensor {
  WeakTensor tensor;
  TensorForm before;

  /// Undefined where it is gone.
  at::Tensor get() const;
};

struct Changes {
  std::vector<ChangedStorage> storages;
  std::vector<ChangedTensor> resized;
};

/// Sees the operators of a function that runs in this thread while it lives: what the function reads and changes of what was
/// there before. The graph that the function makes is cut behind each operator, so that nothing holds what it saves.
class FunctionWatch {
 public:
  /// `skeletons` null: the graph is left whole. `generators`: keeps the states of those of each device that the function uses.
  FunctionWatch(Skeletons* skeletons, bool generators);
  ~FunctionWatch();
  FunctionWatch(const FunctionWatch&) = delete;
  FunctionWatch& operator=(const FunctionWatch&) = delete;

  /// What is there still. @throws what made a copy fail
  std::vector<ReadTensor> reads();
  Changes changes();
  /// Those that it drew from, before it did.
  GeneratorStates drawn_from() const;
  /// True if it changed in place a tensor that has gradients.
  bool changed_in_graph() const { return changed_in_graph_; }
  bool is_born(const at::Tensor& tensor) const;
  /// What it has changed gets its bytes from before, and generators their states.
  void undo() const noexcept;

  /// For the callbacks. `within`: of an operator that another one calls.
  void use(c10::Device device);
  void before(const at::Tensor& input, bool is_changed, bool within);
  void after(const at::Tensor& output, const std::vector<const c10::StorageImpl*>& inputs,
             bool cut);
  FunctionWatch* outer() const { return outer_; }

 private:
  void note_change(const at::Tensor& tensor);

  FunctionWatch* outer_;
  Skeletons* skeletons_;
  bool keeps_generators_;
  GeneratorStates generators_;
  std::optional<at::CallbackHandle> handle_;
  std::unordered_map<const c10::StorageImpl*, WeakStorage> born_;  ///< in the function
  std::unordered_map<const c10::StorageImpl*, WeakStorage> outside_;
  std::unordered_map<const c10::TensorImpl*, ReadTensor> reads_;
  std::unordered_map<const c10::StorageImpl*, ChangedStorage> changes_;
  std::unordered_map<const c10::TensorImpl*, ChangedTensor> changed_;
  size_t sweep_at_ = 512;
  bool changed_in_graph_ = false;
  std::exception_ptr error_;
};

/// While it lives, changed memory holds what it held before the function ran first, and tensors have their sizes of then;
/// afterwards both are as they are now again.
class BytesFromBefore {
 public:
  explicit BytesFromBefore(const Changes& changes);
  ~BytesFromBefore();
  BytesFromBefore(const BytesFromBefore&) = delete;
  BytesFromBefore& operator=(const BytesFromBefore&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> put_back_;  ///< memory, and its bytes
  std::vector<std::pair<at::Tensor, TensorForm>> resized_;   ///< what they are now
};

}  // namespace brimful::ladder
