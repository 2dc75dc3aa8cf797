#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <exception>

#include "../operators/values.h"
#include "count.h"

namespace sim_values {
namespace {

using c10::IValue;
using sim_operators::changed;

template <class Visit>
void each_tensor(const IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isList()) {
    const auto items = value.toListRef();
    if (!items.empty() && !items[0].isTensor() && !items[0].isNone()) {
      return;  // of sizes and such
    }
    for (const IValue& item : items) {
      each_tensor(item, visit);
    }
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Draws as the device's generator would be at, and leaves that as it is.
at::Generator generator_of(const IValue& given) {
  at::Generator cuda =
      given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator(at::kCUDA);
  if (!cuda.device().is_cuda()) {
    return cuda;
  }
  const std::lock_guard lock(cuda.mutex());
  return at::detail::createCPUGenerator(cuda.current_seed() + cuda.get_offset());
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  std::vector<at::Tensor> found;
  each_tensor(value, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

bool overlap(const Place& one, const Place& other) {
  const auto* const a = static_cast<const char*>(one.begin);
  const auto* const b = static_cast<const char*>(other.begin);
  return a < b + other.bytes && b < a + one.bytes;
}

/// Whether torch copies by the runtime, byte for byte, and not by a kernel.
bool is_plain_copy(const Operator& op, c10::ArrayRef<const IValue> inputs) {
  if (op.handle.schema().name() != "aten::copy_") {
    return false;
  }
  const at::Tensor& to = inputs[0].toTensor();
  const at::Tensor& from = inputs[1].toTensor();
  return to.is_cuda() && from.is_cuda() && to.scalar_type() == from.scalar_type() &&
         to.sizes() == from.sizes() && to.is_contiguous() && from.is_contiguous();
}

/// What the device's own code asks it for: how many results there are, or whether they are equal.
int64_t count_in(const IValue& result, std::optional<int64_t> dimension) {
  return result.isBool() ? static_cast<int64_t>(result.toBool())
                         : tensors_of(result)[0].size(dimension.value_or(0));
}

}  // namespace

Call::Call(const Operator& op, c10::ArrayRef<const IValue> inputs) : op_(op) {
  const auto& arguments = op.handle.schema().arguments();
  bool has_generator = false;
  for (size_t i = 0; i < inputs.size() && i < arguments.size(); ++i) {
    each_tensor(inputs[i], [&](const at::Tensor& tensor) { note(arguments[i], i, tensor); });
    has_generator |= arguments[i].name() == "generator";
    touches_device_ |= inputs[i].isDevice() && inputs[i].toDevice().is_cuda();
  }
  follows_ &= op.kind != Kind::unknown && (has_generator || !op.draws) && !stands_for_others_ &&
              touches_device_ && inputs.size() == arguments.size();
  if (follows_ && guesses_) {
    compute_guesses(inputs);
  } else if (follows_) {
    all_to_host(inputs);
  }
  is_plain_copy_ = is_plain_copy(op, inputs);
  if (op.kind == Kind::counts && touches_device_ && !stands_for_others_) {
    expect_count(inputs);
  }
}

Call::~Call() {
  if (expects_) {
    leave_count();
  }
}

void Call::note(const c10::Argument& argument, size_t index, const at::Tensor& tensor) {
  if (stands_for_others(tensor)) {
    stands_for_others_ = true;
    return;
  }
  const auto place = place_of(tensor);
  if (!place && tensor.is_cuda() && argument.is_out() && tensor.numel() == 0) {
    touches_device_ = true;  // it gets memory in the call
    return;
  }
  if (!place) {
    const bool is_constant = at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) ||
                             (tensor.numel() == 1 && tensor.layout() == c10::kStrided);
    follows_ &= tensor.is_cpu() && is_constant && !is_written(argument);
    return;
  }
  touches_device_ = true;
  const bool is_read = !argument.is_out() && !(op_.overwrites && index == 0);
  const bool is_known = !is_read || place->is_known();
  const bool is_guessed =
      !is_known && op_.decides && at::isIntegralType(place->type, /*includeBool=*/true);
  guesses_ |= is_guessed;
  follows_ &= place->may_be_known() && (is_known || is_guessed);
  if (op_.forgets || is_written(argument)) {
    for (size_t i = 0; follows_ && i < forgotten_.size(); ++i) {
      follows_ = !overlap(forgotten_[i], *place);  // in which order they are written matters
    }
    forgotten_.push_back(*place);
  }
}

/// Its values, or what they are taken to be: no bit is set, or each is.
at::Tensor Call::values_of(const Place& place, const at::Tensor& tensor) const {
  if (!guesses_ || place.is_known()) {
    return Layout(place, tensor).values();
  }
  at::Tensor guessed = at::zeros(tensor.sizes(), at::TensorOptions().dtype(place.type));
  return guess_ ? guessed.bitwise_not_() : guessed;
}

/// Computes with either; what does not depend on it is known.
void Call::compute_guesses(c10::ArrayRef<const IValue> inputs) {
  all_to_host(inputs);
  if (!compute()) {
    return;
  }
  const at::Tensor unset = arguments_[0].toTensor();
  guess_ = true;
  written_.clear();
  arguments_.clear();
  all_to_host(inputs);
  follows_ = compute() && unset.equal(arguments_[0].toTensor());
}

void Call::all_to_host(c10::ArrayRef<const IValue> inputs) {
  const auto& arguments = op_.handle.schema().arguments();
  arguments_.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    arguments_.push_back(to_host(arguments[i], i, inputs[i]));
  }
}

at::Tensor Call::to_host(const c10::Argument& argument, size_t index, const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type());
  if (tensor.is_cuda() && argument.is_out()) {
    return at::empty({0}, options);
  }
  const auto place = place_of(tensor);
  if (!place) {
    return tensor;
  }
  if (!is_written(argument)) {
    return values_of(*place, tensor);
  }
  at::Tensor own = at::empty(tensor.sizes(), options);
  if (!(op_.overwrites && index == 0)) {
    own.copy_(values_of(*place, tensor));
  }
  written_.push_back({Layout(*place, tensor), own});
  return own;
}

IValue Call::to_host(const c10::Argument& argument, size_t index, const IValue& value) {
  if (value.isDevice() && value.toDevice().is_cuda()) {
    return c10::Device(c10::kCPU);
  }
  if (argument.name() == "generator" && op_.draws) {
    return generator_of(value);
  }
  return changed(value, [&](const at::Tensor& tensor) { return to_host(argument, index, tensor); });
}

void Call::expect_count(c10::ArrayRef<const IValue> inputs) {
  std::optional<int64_t> known;
  if (follows_ && compute()) {
    known = count_in(arguments_[0], counted_dimension(op_, inputs));
  }
  enter_count(op_, inputs, known);
  expects_ = true;
}

/// False if the host has no such kernel, or it raises.
bool Call::compute() {
  try {
    op_.handle.callBoxed(&arguments_);
    is_computed_ = true;
  } catch (const std::exception&) {
    follows_ = false;
  }
  return is_computed_;
}

void Call::set(const IValue& output, const IValue& result) const {
  const auto theirs = tensors_of(output);
  const auto ours = tensors_of(result);
  for (size_t i = 0; i < theirs.size(); ++i) {
    const auto place = place_of(theirs[i]);
    if (!place) {
      continue;
    }
    if (ours.size() != theirs.size()) {
      place->forget();
    } else if (ours[i].scalar_type() == place->type && ours[i].sizes() == theirs[i].sizes()) {
      if (op_.draws && !at::isIntegralType(place->type, /*includeBool=*/true)) {
        place->forget();
      } else {
        Layout(*place, theirs[i]).set(ours[i]);
      }
    }  // else it is another operator's, for which this one has cast its arguments
  }
}

void Call::set_as_finite(const at::Tensor& output) const {
  if (const auto place = place_of(output)) {
    const bool is_finite = op_.handle.schema().name() == "aten::isfinite";
    Layout(*place, output).set(at::full(output.sizes(), is_finite, at::kBool));
  }
}

void Call::finish(const std::vector<IValue>& outputs) {
  if (stands_for_others_ || std::uncaught_exceptions() > exceptions_) {
    return;  // what fails does so before its kernel
  }
  const auto& returns = op_.handle.schema().returns();
  std::vector<Place> made;  // by this call: views are made of what was there
  const auto is_made = [&](size_t i) {
    const auto* alias = i < returns.size() ? returns[i].alias_info() : nullptr;
    return alias == nullptr || alias->isWrite();
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    each_tensor(outputs[i], [&](const at::Tensor& tensor) {
      if (const auto place = is_made(i) ? place_of(tensor) : std::nullopt) {
        follows_ &= place->may_be_known();
        made.push_back(*place);
      }
    });
  }
  const bool is_known = follows_ && (is_computed_ || compute());
  if (!is_known && is_plain_copy_) {
    return;  // the runtime has copied what is known of it
  }
  if (!is_known && op_.kind == Kind::finite) {
    set_as_finite(outputs[0].toTensor());
    return;
  }
  if (!is_known) {
    made.insert(made.end(), forgotten_.begin(), forgotten_.end());
    for (const Place& place : made) {
      place.forget();
    }
    return;
  }
  for (const Written& each : written_) {
    if (each.values.sizes() == each.layout.sizes) {
      each.layout.set(each.values);
    } else {
      each.layout.place.forget();
    }
  }
  for (size_t i = 0; i < outputs.size() && i < arguments_.size(); ++i) {
    if (is_made(i)) {
      set(outputs[i], arguments_[i]);
    }
  }
}

}  // namespace sim_values
