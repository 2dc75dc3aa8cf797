#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <brimful/pipeline/value.h>

#include "base/text_stream.h"
#include "pipeline/transport/ivalue_form.h"
#include "pipeline/transport/shapes.h"
#include "sizer/ivalue_entries.h"

namespace brimful::pipeline {
namespace {

/// The structure with each tensor replaced by what `replace` makes of it.
template <typename Replace>
c10::IValue rebuilt(const c10::IValue& part, const Replace& replace) {
  if (part.isTensor()) {
    return replace(part.toTensor());
  }
  return with_entries(part, [&](const c10::IValue& item) { return rebuilt(item, replace); });
}

bool has_rows(const at::Tensor& tensor) {
  return tensor.defined() && tensor.dim() > 0;
}
}  // namespace

std::string shapes_of(const std::vector<at::Tensor>& tensors) {
  return Shapes(tensors).to_string();
}

Shapes::Shapes(const std::vector<at::Tensor>& tensors) {
  shapes_.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    auto& shape = shapes_.emplace_back();
    if (tensor.defined()) {
      shape.emplace(Shape{at::DimVector(tensor.sizes()), tensor.scalar_type()});
    }
  }
}

std::string Shapes::to_string() const {
  TextStream text;
  for (size_t i = 0; i < shapes_.size(); ++i) {
    text << (i == 0 ? "" : ", ");
    if (shapes_[i]) {
      text << at::IntArrayRef(shapes_[i]->sizes) << ' ' << shapes_[i]->dtype;
    } else {
      text << "none";
    }
  }
  return shapes_.empty() ? "no tensor" : text.str();
}

Value value_of(const c10::IValue& ivalue) {
  Value value;
  if (ivalue.isTensor()) {
    value.tensors.push_back(ivalue.toTensor());
    return value;
  }
  auto skeleton = rebuilt(ivalue, [&](const at::Tensor& tensor) {
    value.tensors.push_back(tensor);
    return at::Tensor();
  });
  value.form = std::make_shared<IValueForm>(std::move(skeleton));
  return value;
}

c10::IValue to_ivalue(const Value& value) {
  if (value.form == nullptr) {
    if (value.tensors.size() == 1) {
      return value.tensors[0];
    }
    return c10::ivalue::Tuple::create(
        std::vector<c10::IValue>(value.tensors.begin(), value.tensors.end()));
  }
  const auto* form = dynamic_cast<const IValueForm*>(value.form.get());
  TORCH_CHECK_TYPE(form != nullptr, "a stage in C++ got a structure from a stage in Python (form: ",
                   value.form->to_string(), "); pass tensors between such stages");
  size_t next = 0;
  return rebuilt(form->skeleton(), [&](const at::Tensor&) { return value.tensors.at(next++); });
}

Value joined(const std::vector<Value>& pieces) {
  if (pieces.size() == 1) {
    return pieces[0];
  }
  Value whole;
  whole.form = pieces.at(0).form;
  const auto count = pieces[0].tensors.size();
  for (const auto& piece : pieces) {
    TORCH_CHECK_VALUE(piece.tensors.size() == count,
                      "microbatches gave results of different structure (tensors: ", count, " and ",
                      piece.tensors.size(), "); return the same for every microbatch");
    for (size_t i = 0; i < count; ++i) {
      TORCH_CHECK_VALUE(piece.tensors[i].defined() == pieces[0].tensors[i].defined(),
                        "microbatches gave results of different structure (tensor: ", i,
                        ", defined: ", pieces[0].tensors[i].defined(), " and ",
                        piece.tensors[i].defined(), "); return the same for every microbatch");
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (!has_rows(pieces[0].tensors[i])) {
      whole.tensors.push_back(pieces[0].tensors[i]);
      continue;
    }
    std::vector<at::Tensor> parts;
    parts.reserve(pieces.size());
    for (const auto& piece : pieces) {
      parts.push_back(piece.tensors[i]);
    }
    whole.tensors.push_back(at::cat(parts));
  }
  return whole;
}

}  // namespace brimful::pipeline
