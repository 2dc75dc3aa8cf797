#pragma once
#include <brimful/sizer/row_evidence.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/structure.h"

namespace brimful {

/// The rows of a tensor, array or PackedSequence along `dim`, if it has any.
/// @throws c10::ValueError if it lacks `dim`, c10::TypeError for an object that may have rows where it is not said how
std::optional<int64_t> rows_of_leaf(const py::handle& leaf, Kind kind, int64_t dim,
                                    const std::string& path);

/// What may hold a row in each entry: not what has fields.
bool is_list(const py::handle& object, Kind kind);

/// What it says of the batch's rows, if its entries are alike and hold numbers, tensors or arrays. The tuple that a batch
/// is has fields, unless its entries are samples.
std::optional<detail::AlikeList> alike_list(const py::handle& object, Kind kind,
                                            const py::object& batch_dim, const std::string& path);

/// Whether nothing in it has rows of its own: how long it is says how many rows there are, if anything else has as many.
bool waits_for_rows(const py::handle& object, Kind kind);

/// What such a list says. Of entries of several types it may be a setting.
detail::AlikeList plain_list(const py::handle& object, const std::string& path);

/// Whether it has an entry for each row. `alike`: what alike_list() said of it.
bool is_column(const py::handle& object, Kind kind, const std::optional<detail::AlikeList>& alike,
               int64_t rows, const detail::ListReadings& readings);

}  // namespace brimful
