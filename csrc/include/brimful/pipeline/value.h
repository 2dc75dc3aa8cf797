#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace c10 {
struct IValue;
}

namespace brimful::pipeline {

class FormWriter;

/// How the tensors of a Value are put together: of whatever language made it. Never holds tensors that need a gradient.
class BRIMFUL_API Form {
 public:
  virtual ~Form() = default;
  /// For messages to people.
  virtual std::string to_string() const = 0;
  /// For another process.
  /// @throws c10::TypeError, by default, or for what does not go there
  virtual void write(FormWriter& writer) const;
};

/// What a stage takes and gives: its tensors in order, and how they are put together. Without a form they are the
/// arguments, or the results, one after the other. All that moves between stages is in `tensors`.
struct Value {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<const Form> form;
};

/// "[8, 64] Float, [8] Long"
BRIMFUL_API std::string shapes_of(const std::vector<at::Tensor>& tensors);

/// A tensor, or a tuple, list or dict of IValues, as a Value; all that is no tensor is part of the form.
BRIMFUL_API Value value_of(const c10::IValue& ivalue);
/// What value_of() was given, with the Value's tensors in it; a tuple where a Value without a form has not one tensor.
BRIMFUL_API c10::IValue to_ivalue(const Value& value);

inline Value value_of(at::Tensor tensor) {
  Value value;
  value.tensors.push_back(std::move(tensor));
  return value;
}
inline Value value_of(std::vector<at::Tensor> tensors) {
  return {std::move(tensors), nullptr};
}
inline Value value_of(Value value) {
  return value;
}
template <typename... Tensors>
Value value_of(std::tuple<Tensors...> tensors) {
  return std::apply([](auto&... each) { return Value{{at::Tensor(each)...}, nullptr}; }, tensors);
}
inline Value value_of(const std::pair<at::Tensor, at::Tensor>& pair) {
  return {{pair.first, pair.second}, nullptr};
}

/// The rows of all `pieces`, one after the other: tensors of the same place are joined along dimension 0; what has no
/// dimensions, and the form, are those of the first.
/// @throws c10::ValueError if the pieces differ in the number of their tensors
BRIMFUL_API Value joined(const std::vector<Value>& pieces);

}  // namespace brimful::pipeline
