#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <brimful/sizer/split.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "sizer/ivalue_entries.h"

namespace brimful::detail {
namespace {

/// Rows of a CSR tensor are runs of its values.
at::Tensor slice_csr(const at::Tensor& tensor, const Range& range) {
  const int64_t count = range.end - range.begin;
  const auto bounds = tensor.crow_indices().narrow(0, range.begin, count + 1);
  const auto first = bounds[0].item<int64_t>();
  const auto entries = bounds[count].item<int64_t>() - first;
  auto sizes = tensor.sizes().vec();
  sizes[0] = count;
  return at::sparse_compressed_tensor(
      bounds - first, tensor.col_indices().narrow(0, first, entries),
      tensor.values().narrow(0, first, entries), sizes, tensor.options());
}

at::Tensor slice_wrapped(const at::Tensor& tensor, int64_t dim, const Range& range) {
  switch (tensor.layout()) {
    case at::kSparse:
      return at::narrow_copy(tensor, dim, range.begin, range.end - range.begin);
    case at::kSparseCsr:
      TORCH_CHECK_TYPE(tensor.crow_indices().dim() == 1 && dim == 0,
                       "a CSR tensor has rows in dimension 0 only (dim: ", dim,
                       ", shape: ", tensor.sizes(), "); pass it as COO");
      return slice_csr(tensor, range);
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      TORCH_CHECK_TYPE(false,
                       "a tensor of this layout cannot be cut into rows (layout: ", tensor.layout(),
                       "); pass it as COO or CSR");
    default:
      return tensor.narrow(dim, range.begin, range.end - range.begin);
  }
}

bool are_alike(at::TensorList tensors) {
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
    return tensor.defined() && tensor.dim() == tensors[0].dim() &&
           tensor.dtype() == tensors[0].dtype() && tensor.layout() == tensors[0].layout();
  });
}

AlikeList list_of(at::TensorList tensors, std::string name) {
  AlikeList list{std::move(name), static_cast<int64_t>(tensors.size()), {}, false};
  for (const auto& tensor : tensors) {
    const auto rows = tensor_rows(tensor, 0);
    list.uneven = list.uneven || (list.column_rows && list.column_rows != rows);
    list.column_rows = list.column_rows ? list.column_rows : rows;
  }
  return list;
}

bool has_tensor(const c10::IValue& part) {
  bool found = part.isTensor();
  part.visit([&](const c10::IValue& inner) {
    found = found || inner.isTensor();
    return found;
  });
  return found;
}

/// Numbers, texts, and lists of them.
bool is_plain_type(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::StringType:
      return true;
    case c10::TypeKind::ListType:
      return is_plain_type(*type.castRaw<c10::ListType>()->getElementType());
    default:
      return false;
  }
}

bool is_list_of_rows(const c10::IValue& list, int64_t rows) {
  return list.isTensorList()
             ? are_rows(list.toTensorVector(), rows)
             : !has_tensor(list) && static_cast<int64_t>(list.toListRef().size()) == rows;
}
}  // namespace

Rows tensor_rows(const at::Tensor& tensor, int64_t dim) {
  if (!tensor.defined() || tensor.dim() == 0) {
    return std::nullopt;
  }
  TORCH_CHECK_VALUE(dim >= -tensor.dim() && dim < tensor.dim(),
                    "a tensor of the batch lacks the dimension of its rows (dim: ", dim,
                    ", shape: ", tensor.sizes(), "); name one that it has");
  return tensor.size(dim);
}

void add_list(RowEvidence& found, at::TensorList tensors) {
  if (are_alike(tensors)) {
    found.lists.push_back(list_of(tensors, "list number " + std::to_string(found.lists.size())));
    return;
  }
  for (const auto& tensor : tensors) {
    add_rows(found, tensor_rows(tensor, 0));
  }
}

bool are_rows(at::TensorList tensors, int64_t rows) {
  return are_alike(tensors) && reading_of(list_of(tensors, ""), rows, {}) == Reading::rows;
}

at::Tensor slice_tensor(const at::Tensor& tensor, int64_t dim, const Range& range) {
  return tensor_rows(tensor, dim)
             ? slice_wrapped(tensor, c10::maybe_wrap_dim(dim, tensor.dim()), range)
             : tensor;
}

void Part<c10::IValue>::count(const c10::IValue& part, RowEvidence& found) {
  if (part.isTensor()) {
    add_rows(found, tensor_rows(part.toTensor(), 0));
  } else if (part.isTensorList()) {
    add_list(found, part.toTensorVector());
  } else if (part.isList() && is_plain_type(*part.toList().elementType())) {
    const bool numbers = part.isIntList() || part.isDoubleList() || part.isBoolList();
    found.lists.push_back({"numbers or texts",
                           static_cast<int64_t>(part.toListRef().size()),
                           {},
                           false,
                           numbers ? Entries::tensors : Entries::plain});
  } else if (part.isList() || part.isTuple() || part.isGenericDict()) {
    for_each_entry(part, [&](const c10::IValue& item) { count(item, found); });
  } else {
    const bool may_have_rows = part.isObject() || part.isCapsule() || part.isPyObject();
    TORCH_CHECK_TYPE(
        !may_have_rows && !has_tensor(part),
        "this part of the batch cannot be split (type: ", part.tagKind(),
        "); pass tensors, lists, tuples or dicts, and Shared{} for what all pieces get "
        "whole");
  }
}

c10::IValue Part<c10::IValue>::slice(const c10::IValue& part, const Range& range) {
  if (part.isTensor()) {
    return slice_tensor(part.toTensor(), 0, range);
  }
  if (!part.isList() || !is_list_of_rows(part, range.rows)) {
    return with_entries(part, [&](const c10::IValue& item) { return slice(item, range); });
  }
  const auto whole = part.toList();
  c10::impl::GenericList piece(whole.elementType());
  for (int64_t i = range.begin; i < range.end; ++i) {
    piece.push_back(whole.get(i));
  }
  return piece;
}

void Part<c10::IValue>::describe(const c10::IValue& part, RowKind& kind) {
  if (part.isTensor()) {
    kind.add(part.toTensor(), 0);
  } else {
    for_each_entry(part, [&](const c10::IValue& item) { describe(item, kind); });
  }
}

void Part<c10::IValue>::visit(const c10::IValue& part, const Visit& visit) {
  part.visit([&](const c10::IValue& inner) {
    if (inner.isTensor()) {
      visit(inner.toTensor());
    }
    return false;
  });
}

}  // namespace brimful::detail
