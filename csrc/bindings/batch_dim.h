#pragma once
#include <string>
#include <vector>

#include "bindings/structure.h"

namespace brimful {

// batch_dim: which dimension holds a batch's rows. An int for a whole structure, None for what every piece gets whole,
// or entries that mirror the batch: a sequence of the same length, or a dict by key, field or index; dimension 0 where
// it says nothing.

/// A copy of ints, None, dicts and tuples.
/// @throws c10::TypeError for anything else in it
py::object checked_batch_dim(const py::handle& batch_dim, const std::string& path = "batch_dim");

inline bool mirrors(const py::handle& batch_dim) {
  return PyDict_Check(batch_dim.ptr()) || PyTuple_Check(batch_dim.ptr());
}

/// The batch_dim of each entry of `object`.
/// @throws c10::ValueError if it names an entry that is not there, or is of another length
std::vector<py::object> batch_dims_of(const py::object& batch_dim, const py::handle& object,
                                      Kind kind, const std::vector<Entry>& entries,
                                      const std::string& path);

}  // namespace brimful
