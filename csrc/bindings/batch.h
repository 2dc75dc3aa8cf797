#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

#include "bindings/bindings.h"

namespace brimful {

/// Rows of a batch: the size of dimension 0, equal in all its tensors. Tuples, namedtuples, lists and dicts are walked.
/// @throws c10::ValueError if tensors disagree (both are named), c10::TypeError if there is no tensor
int64_t rows_of(const py::handle& batch);

/// The same structure with views of rows [begin, end); 0-dim tensors and other objects are shared by all pieces, a list
/// with as many entries as rows, none of them a tensor, is cut.
py::object slice_rows(const py::handle& batch, int64_t rows, int64_t begin, int64_t end);

/// Calls `visit` for every tensor in an object's structure.
void for_each_tensor(const py::handle& object, const std::function<void(const at::Tensor&)>& visit);

}  // namespace brimful
