#pragma once
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// A tensor of the program whose graph keeps a storage.
struct GraphRoot {
  PyObject* tensor = nullptr;  // borrowed from the list that was searched
  std::string node;            // that made it: "AddBackward0"
  bool is_gradient = false;    // the graph is that of its .grad
};

/// For each of the storages that begin at `wanted` and are saved in the graph of one of `tensors`: that tensor, the one
/// whose graph is the smallest if there are several. Saved tensors that hooks have packed are not unpacked. With the GIL
/// held.
std::unordered_map<const void*, GraphRoot> find_graph_roots(
    const std::vector<PyObject*>& tensors, const std::unordered_set<const void*>& wanted);

/// Whether a tensor, or its gradient, has a graph.
bool has_graph(PyObject* tensor);

/// The first byte of a tensor's storage; null if it has none.
const void* storage_of(PyObject* tensor);

}  // namespace brimful
