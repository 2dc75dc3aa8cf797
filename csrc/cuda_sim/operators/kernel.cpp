#include "kernel.h"

#include <string>
#include <utility>
#include <vector>

#include "values.h"

namespace sim_operators {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_half(const at::Tensor& tensor) {
  return tensor.defined() &&
         (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
}

bool lacks_half(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.find("not implemented for 'Half'") != std::string::npos ||
         text.find("not implemented for 'BFloat16'") != std::string::npos;
}

/// The first half type among the arguments.
std::optional<at::ScalarType> half_among(const Stack& values) {
  std::optional<at::ScalarType> found;
  for (const IValue& value : values) {
    changed(value, [&](const at::Tensor& tensor) {
      if (!found && is_half(tensor)) {
        found = tensor.scalar_type();
      }
      return tensor;
    });
  }
  return found;
}

void call_in_32_bits(const c10::OperatorHandle& op, at::ScalarType half, Stack* stack) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // a half tensor, and its values in 32 bits
  for (IValue& value : *stack) {
    value = changed(value, [&](const at::Tensor& tensor) {
      if (!is_half(tensor)) {
        return tensor;
      }
      pairs.emplace_back(tensor, tensor.to(at::kFloat));
      return pairs.back().second;
    });
  }
  op.callBoxed(stack);
  for (IValue& value : *stack) {
    value = changed(value, [&](const at::Tensor& result) {
      for (const auto& [narrow, wide] : pairs) {
        if (wide.is_same(result)) {
          narrow.resize_(wide.sizes()).copy_(wide);  // written to: in place, or out=
          return narrow;
        }
      }
      return result.defined() && result.scalar_type() == at::kFloat ? result.to(half) : result;
    });
  }
}

}  // namespace

void call_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto half = half_among(*stack);
  if (!half) {
    op.callBoxed(stack);
    return;
  }
  Stack again = *stack;
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    if (!lacks_half(error)) {
      throw;
    }
    call_in_32_bits(op, *half, &again);
    *stack = std::move(again);
  }
}

}  // namespace sim_operators
