#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/bindings.h"

namespace brimful {

/// How a type that is no structure to brimful is cut: two functions of register_split(), or None for one that every piece
/// gets whole.
struct OwnSplit {
  py::object rows_of;
  py::object slice_rows;
};

/// What was registered for the object's type, or the nearest of its bases.
std::optional<OwnSplit> own_split_of(const py::handle& object);

/// Rows by the registered function; nothing where it returns None, or the type is whole.
/// @throws c10::TypeError if it returns no int, c10::ValueError if that is negative
std::optional<int64_t> own_rows(const OwnSplit& own, const py::handle& object);

/// The piece that its function returns, or the object itself where it has no rows.
py::object own_slice(const OwnSplit& own, const py::handle& object, int64_t begin, int64_t end);

/// Of NumPy.
bool is_array(const py::handle& object);

/// Text, numbers, functions, types, dtypes and the like, and sets of them: nothing in them has rows.
bool is_plain(const py::handle& object);

/// Of torch.nn.attention.flex_attention.
bool is_block_mask(const py::handle& object);

/// Tensors and all else that a BlockMask is made of, as a tuple of a type of its own; and back. Each is itself if it is
/// neither.
py::object opened_block_mask(const py::handle& object);
py::object closed_block_mask(const py::object& object);

}  // namespace brimful
