#pragma once
#include <ATen/core/stack.h>
#include <ATen/record_function.h>

#include <exception>
#include <optional>
#include <vector>

#include "operators.h"
#include "place.h"

namespace sim_values {

/// One call of an operator, from before its kernel to after it: what is known of its results follows from what is known
/// of its arguments.
class Call : public at::ObserverContext {
 public:
  Call(const Operator& op, c10::ArrayRef<const c10::IValue> inputs);
  ~Call() override;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  /// When the device's own code is done.
  void finish(const std::vector<c10::IValue>& outputs);

 private:
  c10::IValue to_host(const c10::Argument& argument, size_t index, const c10::IValue& value);
  at::Tensor to_host(const c10::Argument& argument, size_t index, const at::Tensor& tensor);
  void all_to_host(c10::ArrayRef<const c10::IValue> inputs);
  at::Tensor values_of(const Place& place, const at::Tensor& tensor) const;
  void compute_guesses(c10::ArrayRef<const c10::IValue> inputs);
  void note(const c10::Argument& argument, size_t index, const at::Tensor& tensor);
  void expect_count(c10::ArrayRef<const c10::IValue> inputs);
  bool compute();
  void set_as_finite(const at::Tensor& output) const;
  void set(const c10::IValue& output, const c10::IValue& result) const;

  struct Written {
    Layout layout;
    at::Tensor values;  // on the host
  };

  const Operator& op_;
  std::vector<Place> forgotten_;  // arguments that it changes, or may change without saying so
  std::vector<Written> written_;  // of a call whose results follow from what is known
  torch::jit::Stack arguments_;   // on the host; afterwards the results
  bool touches_device_ = false;
  bool stands_for_others_ = false;
  bool follows_ = true;   // its results follow from values that are known
  bool guesses_ = false;  // some of its arguments are not known, and may not matter
  bool guess_ = false;    // whether their bits are set
  bool is_computed_ = false;
  bool expects_ = false;
  bool is_plain_copy_ = false;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace sim_values
