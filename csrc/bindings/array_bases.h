#pragma once
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// NumPy's arrays that share a tensor's memory. The garbage collector knows neither them nor, often, the dicts and tuples
/// that hold nothing but such: who refers to whom is noted here. With the GIL held; keeps what it found.
class ArrayBases {
 public:
  /// Looks through what `objects` and `roots` refer to, and appends to `objects` the containers that they leave out.
  void look(py::list& objects, const std::vector<py::object>& roots);
  /// The arrays whose base is one of `wanted`.
  void add_referrers(const std::unordered_set<PyObject*>& wanted,
                     std::unordered_map<PyObject*, std::vector<PyObject*>>& found) const;

 private:
  void add(py::object array, const py::object& base_of);
  void add_unlisted_tensors(py::list& objects) const;

  std::vector<py::object> kept_;
  std::unordered_map<PyObject*, std::vector<PyObject*>> arrays_;  // by base
};

}  // namespace brimful
