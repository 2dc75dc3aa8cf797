#pragma once
#include <brimful/sizer/split_part.h>

#include <optional>
#include <vector>

#include "bindings/structure.h"

namespace brimful {

// Classes of the program's own may keep state beside their tensors, such as a voxel size for each row: their own
// indexing, object[begin:end], knows how that is cut.

/// Rows of a tensor of a subclass.
/// @throws c10::TypeError if its own indexing raises, or loses the class, its attributes or the rows
py::object slice_subclass(const py::handle& tensor, int64_t dim, const detail::Range& range);

/// What its own indexing makes of a mapping or dataclass, if that has the same class and the same entries as `cut`, which
/// was cut entry by entry; nothing for what is not indexed by rows.
std::optional<py::object> slice_structure(const py::handle& object, Kind kind,
                                          const std::vector<Entry>& cut, int64_t dim,
                                          const detail::Range& range);

/// Of a structure that was made again from its entries, or of an array.
/// @throws c10::TypeError if an attribute has something for each row, or is lost, or the class is
void require_state_kept(const py::handle& original, const py::handle& piece,
                        const std::vector<Entry>& entries, int64_t rows);

}  // namespace brimful
