#include "sharded/collective_call.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace brimful {
namespace {
using Arguments = std::vector<c10::IValue>;
constexpr size_t kGatheredAt = 1;  // of the arguments of _allgather_base_

/// The same argument with each tensor as `made` gives it: a tensor, a list of them, a list of lists, or none.
c10::IValue with_tensors(const c10::IValue& value,
                         const std::function<at::Tensor(const at::Tensor&)>& made) {
  if (value.isTensor()) {
    return made(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorList()) {
      all.push_back(made(each));
    }
    return all;
  }
  if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<at::Tensor>> lists;
    for (const auto& list : value.toListRef()) {
      lists.push_back(with_tensors(list, made).toTensorList());
    }
    return lists;
  }
  return value;
}

bool looks_like(const at::Tensor& one, const at::Tensor& other, bool free) {
  return one.defined() == other.defined() &&
         (!one.defined() ||
          (one.scalar_type() == other.scalar_type() && (free || one.sizes() == other.sizes())));
}

bool is_same(const c10::IValue& one, const c10::IValue& other, bool free) {
  if (one.isTensor() || other.isTensor()) {
    return one.isTensor() && other.isTensor() && looks_like(one.toTensor(), other.toTensor(), free);
  }
  if (one.isList() && other.isList()) {
    const auto ours = one.toListRef();
    const auto theirs = other.toListRef();
    bool same = ours.size() == theirs.size();
    for (size_t i = 0; same && i < ours.size(); ++i) {
      same = is_same(ours[i], theirs[i], free);
    }
    return same;
  }
  return one.isObject() ||
         one.isNone() == other.isNone();  // timeouts and flags make no other call of it
}

Arguments::const_iterator first_of(const c10::OperatorHandle& op, const Arguments& stack) {
  return stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
}

template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      each_tensor(element, visit);
    }
  }
}

/// Those that are defined, in the order of the arguments.
template <typename Visit>
void each_tensor_of(const c10::OperatorHandle& op, const Arguments& arguments, const Visit& visit) {
  for (auto each = first_of(op, arguments); each != arguments.end(); ++each) {
    each_tensor(*each, [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        visit(tensor);
      }
    });
  }
}

bool is_a(const c10::IValue& value, const char* name) {
  return value.isObject() && value.type()->str().find(name) != std::string::npos;
}

c10d::ReduceOp::RedOpType kind_of(const c10::IValue& reduce_op) {
  return reduce_op.toCustomClass<c10d::ReduceOp>()->op_;
}

at::Tensor without_values(const at::Tensor& tensor) {
  return tensor.defined() ? at::empty(tensor.sizes(), tensor.options().device(at::kMeta)) : tensor;
}

std::optional<at::Tensor> first_tensor(const c10::IValue& value) {
  std::optional<at::Tensor> first;
  each_tensor(value, [&](const at::Tensor& tensor) {
    first = first ? first : std::optional<at::Tensor>(tensor);
  });
  return first;
}
}  // namespace

CollectiveCall::CollectiveCall(const c10::OperatorHandle& op, const Arguments& arguments)
    : op_(op), device_(c10::DeviceType::CPU) {
  const at::NoGradGuard no_grad;
  for (auto each = first_of(op, arguments); each != arguments.end(); ++each) {
    if (const auto tensor = first_tensor(*each); tensor && tensor->defined()) {
      device_ = tensor->device();
    }
    if (is_a(*each, "ProcessGroup")) {
      group_at_ = arguments_.size();
      group_ = each->toCustomClass<c10d::ProcessGroup>();
    } else if (is_a(*each, "ReduceOp")) {
      reduce_op_at_ = arguments_.size();
    }
    arguments_.push_back(with_tensors(*each, without_values));
  }
}

bool CollectiveCall::is(const c10::OperatorHandle& op, const Arguments& arguments,
                        bool free) const {
  if (!(op == op_)) {
    return false;
  }
  const auto theirs = first_of(op, arguments);
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto& their = *(theirs + static_cast<std::ptrdiff_t>(i));
    const bool same = i == group_at_       ? their.toCustomClass<c10d::ProcessGroup>() == group_
                      : i == reduce_op_at_ ? kind_of(their) == kind_of(arguments_[i])
                                           : is_same(arguments_[i], their, free);
    if (!same) {
      return false;
    }
  }
  return true;
}

at::Tensor CollectiveCall::gathered_input() const {
  return op_.schema().name() == "c10d::_allgather_base_" ? arguments_.at(kGatheredAt).toTensor()
                                                         : at::Tensor();
}

Arguments CollectiveCall::with_tensors_of(const Made& made) const {
  auto stack = arguments_;
  for (auto& argument : stack) {
    argument = with_tensors(
        argument, [&](const at::Tensor& meta) { return meta.defined() ? made(meta) : meta; });
  }
  return stack;
}

void CollectiveCall::call(Arguments stack) const {
  op_.callBoxed(stack);
  if (!stack.empty() && stack.back().isObject()) {
    stack.back().toCustomClass<c10d::Work>()->wait();
  }
}

void CollectiveCall::issue(const at::Tensor& input) const {
  const at::NoGradGuard no_grad;
  auto stack = with_tensors_of([&](const at::Tensor& meta) {
    return at::zeros(meta.sizes(), meta.options().device(device_));
  });
  if (input.defined()) {
    stack.at(kGatheredAt) = input;
  }
  call(std::move(stack));
}

void CollectiveCall::issue_sized(const CallSizes& sizes) const {
  const at::NoGradGuard no_grad;
  const std::span<const int64_t> all(sizes);
  size_t at = 0;
  auto stack = with_tensors_of([&](const at::Tensor& meta) {
    TORCH_CHECK(at < all.size() && all.size() - at > static_cast<size_t>(all[at]),
                "another rank's call has fewer tensors than this rank's (", name(), ")");
    const auto shape = all.subspan(at + 1, static_cast<size_t>(all[at]));
    at += 1 + shape.size();
    return at::zeros({shape.data(), shape.size()}, meta.options().device(device_));
  });
  TORCH_CHECK(at == all.size(), "another rank's call has more tensors than this rank's (", name(),
              ")");
  call(std::move(stack));
}

bool CollectiveCall::has_sizes() const {
  return op_.schema().name().find("barrier") == std::string::npos;
}

bool CollectiveCall::is_alike_on_ranks() const {
  static constexpr std::array kAlike{"_allgather_base_",     "_reduce_scatter_base_",
                                     "allgather_",           "allreduce_",
                                     "allreduce_coalesced_", "allgather_into_tensor_coalesced_",
                                     "broadcast_",           "reduce_",
                                     "reduce_scatter_",      "reduce_scatter_tensor_coalesced_",
                                     "alltoall_base_"};
  const auto name = op_.schema().name();
  const auto is_named = [&](const char* kind) { return name == std::string("c10d::") + kind; };
  return std::any_of(kAlike.begin(), kAlike.end(), is_named) &&
         std::all_of(arguments_.begin(), arguments_.end(), [](const c10::IValue& argument) {
           return !argument.isIntList() || argument.toIntList().empty();  // split sizes
         });
}

void append_storages(const c10::OperatorHandle& op, const Arguments& arguments,
                     WeakStorages& storages) {
  each_tensor_of(op, arguments, [&](const at::Tensor& tensor) {
    if (tensor.has_storage()) {
      storages.push_back(tensor.storage().getWeakStorageImpl());
    }
  });
}

void append_sizes(const c10::OperatorHandle& op, const Arguments& arguments, CallSizes& sizes) {
  each_tensor_of(op, arguments, [&](const at::Tensor& tensor) {
    sizes.push_back(tensor.dim());
    sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  });
}

std::string CollectiveCall::name() const {
  return name_of(op_, arguments_);
}

std::string name_of(const c10::OperatorHandle& op, const Arguments& arguments) {
  auto text = op.schema().name();
  text = text.substr(text.rfind(':') + 1);
  for (auto each = first_of(op, arguments); each != arguments.end(); ++each) {
    if (const auto tensor = first_tensor(*each); tensor && tensor->defined()) {
      std::string sizes;
      for (const auto size : tensor->sizes()) {
        sizes.append(sizes.empty() ? "" : ", ").append(std::to_string(size));
      }
      return text.append(" of [").append(sizes).append("] ").append(
          c10::toString(tensor->scalar_type()));
    }
  }
  return text;
}

}  // namespace brimful
