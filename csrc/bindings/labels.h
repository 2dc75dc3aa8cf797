#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/memory/categories.h>
#include "bindings/bindings.h"

#include <string>
#include <utility>
#include <vector>

namespace brimful {

/// Tensors and the names of their categories; what no device of ours holds is left out.
/// @throws c10::ValueError for a name that is none
std::vector<memory::Label> labels_of(
    const std::vector<std::pair<at::Tensor, std::string>>& tensors);

py::dict as_dict(const memory::CategoryBytes& bytes);

}  // namespace brimful
