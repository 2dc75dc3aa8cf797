#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// Of a collective's tensors, in the order of its arguments: for each the number of its dimensions, and their sizes.
using CallSizes = std::vector<int64_t>;
/// Of a collective's tensors, whose values they keep no longer than others do.
using WeakStorages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

/// A collective as it was issued: its operator of c10d with all arguments, but of tensors only what they look like. So it
/// can be issued once more, with whatever kind, sizes, reduce operation, root and group it had, in the group's order.
class CollectiveCall {
 public:
  /// `arguments`: what the operator is called with, on top of the stack.
  CollectiveCall(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

  /// Whether a call with these arguments, on top of the stack, is the same but for its tensors' values, and for their sizes
  /// if those are `free`. Allocates nothing.
  bool is(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
          bool free = false) const;
  /// Issues it, and waits for it. Tensors are made for it, of zeros; `input`, if defined, has the values of the only tensor
  /// that it sends.
  void issue(const at::Tensor& input) const;
  /// The same with tensors of these sizes, which another rank of its group has.
  /// @throws c10::Error if they are not those of such a call
  void issue_sized(const CallSizes& sizes) const;
  /// Whether its tensors have the same sizes on all ranks of the group, so that another rank's say what this one's are.
  bool is_alike_on_ranks() const;
  /// Of an all-gather of one tensor: what that looks like, as a meta tensor. Undefined of others.
  at::Tensor gathered_input() const;
  /// Those of a barrier's tensors say nothing.
  bool has_sizes() const;
  /// Null for an operator that has none.
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  /// For messages: "_allgather_base_ of [4096] Float".
  std::string name() const;

 private:
  using Made = std::function<at::Tensor(const at::Tensor& meta)>;
  std::vector<c10::IValue> with_tensors_of(const Made& made) const;
  void call(std::vector<c10::IValue> stack) const;

  c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;  ///< tensors are meta tensors
  c10::Device device_;
  size_t group_at_ = SIZE_MAX;  ///< in the arguments, as the next one; SIZE_MAX: it has none
  size_t reduce_op_at_ = SIZE_MAX;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

/// Appends those of a call that is not kept.
void append_sizes(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                  CallSizes& sizes);
void append_storages(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments,
                     WeakStorages& storages);
/// As CollectiveCall::name, of a call that is not kept.
std::string name_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);

}  // namespace brimful
