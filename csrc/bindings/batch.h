#pragma once
#include <brimful/sizer/row_evidence.h>
#include <brimful/sizer/row_kind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/structure.h"

namespace brimful {

/// Shapes and dtypes of one row: batches of one kind need memory by the same law. Needs the GIL.
RowKind row_kind_of(const py::handle& row);

/// Splits a batch of Python: tensors and NumPy arrays in tuples, lists, mappings and dataclasses, PackedSequences, jagged
/// and sparse tensors, BlockMasks, and objects of registered types (split_types.h); or whatever two functions of the
/// user's take. Needs the GIL.
class Splitter {
 public:
  /// @throws c10::TypeError for a batch_dim of other types, c10::ValueError if one function comes without the other, or
  /// both with a batch_dim
  explicit Splitter(const py::object& batch_dim = py::int_(0),
                    std::optional<py::function> size_fn = std::nullopt,
                    std::optional<py::function> split_fn = std::nullopt);

  /// Rows of a batch, equal in all its tensors. `known`: how many it is expected to have, such as a target by its batch;
  /// lists are read by them.
  /// @throws c10::ValueError if tensors disagree (both are named), or a list may hold rows as well as columns, c10::TypeError if there is no tensor, or a part that is
  /// neither cut nor said to be whole (it is named)
  int64_t rows_of(const py::handle& batch, std::optional<int64_t> known = std::nullopt) const;

  /// The same; nothing for a batch without a tensor that has rows. Not for functions of the user's. `name`: of the batch,
  /// in errors.
  std::optional<int64_t> rows_if_any(const py::handle& batch, const std::string& name = "batch",
                                     std::optional<int64_t> known = std::nullopt) const;

  /// The same structure with rows [begin, end), of a batch that rows_of() was asked about: views of dense tensors and
  /// arrays. Lists and tuples with an entry for each row are cut; 0-dim tensors, plain objects and what is said to be
  /// whole are shared by all pieces.
  py::object slice(const py::handle& batch, int64_t rows, int64_t begin, int64_t end) const;

  /// The tensors in rows [begin, end), for KeptBatch: those of the batch itself where that is all of it.
  std::vector<NamedTensor> tensors(const py::handle& batch, int64_t rows, int64_t begin,
                                   int64_t end) const;

 private:
  py::object batch_dim_;
  std::optional<py::function> size_fn_;
  std::optional<py::function> split_fn_;
  mutable detail::ListReadings readings_;  ///< of earlier batches
};

}  // namespace brimful
