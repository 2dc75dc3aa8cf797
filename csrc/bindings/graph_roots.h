#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// Of whatever kind torch's are.
using NodePointer = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

/// A tensor of the program whose graph keeps a storage.
struct GraphRoot {
  PyObject* tensor = nullptr;  // borrowed from the list that was searched
  std::string node;            // that made it: "AddBackward0"
  bool is_gradient = false;    // the graph is that of its .grad
};

/// For each of the storages that begin at `wanted` and are saved in the graph of one of `tensors`, or are a leaf's there, a
/// leaf's gradient's or in a function's context: that tensor, the one whose graph is the smallest if there are several. Saved
/// tensors that hooks have packed are not unpacked, and graphs that backward() has freed have saved none. With the GIL held.
std::unordered_map<const void*, GraphRoot> find_graph_roots(
    const std::vector<PyObject*>& tensors, const std::unordered_set<const void*>& wanted);

/// Whether a tensor, or its gradient, has a graph.
bool has_graph(PyObject* tensor);

/// The node that made a tensor, as it stands: a view of what was changed in place is not brought up to date.
NodePointer graph_of(const at::Tensor& tensor);

/// Of a tensor that is no other's result, as `.grad`; undefined if there is none.
at::Tensor gradient_of(PyObject* tensor);

/// The first byte of a tensor's storage; null if it has none, or it is on a device that is not tracked.
const void* storage_of(const at::Tensor& tensor);
const void* storage_of(PyObject* tensor);
/// The same of its gradient, which need not be an object of Python's.
const void* gradient_storage_of(PyObject* tensor);

}  // namespace brimful
