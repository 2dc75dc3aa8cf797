#pragma once
#include <ATen/core/ivalue.h>

#include "pipeline/transport/form_bytes.h"

namespace brimful::pipeline {

/// The structure itself, with undefined tensors where there were others.
class IValueForm : public Form {
 public:
  explicit IValueForm(c10::IValue skeleton) : skeleton_(std::move(skeleton)) {}
  std::string to_string() const override { return skeleton_.tagKind(); }
  void write(FormWriter& writer) const override;
  const c10::IValue& skeleton() const { return skeleton_; }

 private:
  c10::IValue skeleton_;
};

/// What write() of any form has written; records become tuples of their values.
std::shared_ptr<const Form> ivalue_form(FormReader& reader);

}  // namespace brimful::pipeline
