#include "bindings/graph_roots.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "bindings/native_read.h"
#include "bindings/python_heap.h"

namespace brimful {
namespace {

using Node = torch::autograd::Node;

/// Walks graphs in C++; what a node has saved only Python's view of it names, read without code of the program's.
class Walk {
 public:
  Walk(const std::unordered_set<const void*>& wanted) : wanted_(wanted) {}

  void from(const GraphRoot& root, const NodePointer& node) {
    std::vector<NodePointer> ahead{node};
    while (!ahead.empty()) {
      const NodePointer at = std::move(ahead.back());
      ahead.pop_back();
      if (at == nullptr || !seen_.insert(at.get()).second) {
        continue;
      }
      kept_.push_back(at);  // so that no other node gets its address
      look_at_saved(at, root);
      look_at_leaf(at, root);
      for (const auto& edge : at->next_edges()) {
        ahead.push_back(edge.function);
      }
    }
  }

  std::unordered_map<const void*, GraphRoot> found;

 private:
  void look_at_saved(const NodePointer& node, const GraphRoot& root) {
    const auto view = steal(torch::autograd::functionToPyObject(node));
    if (!view) {
      return;
    }
    for (PyObject* const getter : getters_of(Py_TYPE(view.ptr()))) {
      // Of a graph that backward() has freed, this raises.
      const auto saved = steal(Py_TYPE(getter)->tp_descr_get(
          getter, view.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(view.ptr()))));
      look_at(saved, root);
    }
    look_at_context(view.ptr(), root);
  }

  // A function of the program's keeps what it likes in its context.
  void look_at_context(PyObject* view, const GraphRoot& root) {
    PyObject** const context =
        PyObject_TypeCheck(view, &THPFunctionType) != 0 ? _PyObject_GetDictPtr(view) : nullptr;
    if (context == nullptr || *context == nullptr || PyDict_CheckExact(*context) == 0) {
      return;
    }
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(*context, &at, &name, &value) != 0;) {
      if (is_tensor(value)) {
        look_at(py::reinterpret_borrow<py::object>(value), root);
      }
    }
  }

  void look_at_leaf(const NodePointer& node, const GraphRoot& root) {
    if (const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get())) {
      const auto& variable = leaf->variable;
      look_at_storage(storage_of(variable), root);
      const auto* const meta =
          variable.defined() ? torch::autograd::impl::get_autograd_meta(variable) : nullptr;
      if (meta != nullptr) {
        look_at_storage(storage_of(meta->grad_), root);
      }
    }
  }

  // torch's own; a class of the program's may have others of the same name.
  const std::vector<PyObject*>& getters_of(PyTypeObject* type) {
    auto [entry, is_new] = getters_.try_emplace(type);
    for (Py_ssize_t k = 0; is_new && k < PyTuple_GET_SIZE(type->tp_mro); ++k) {
      PyObject* const names =
          reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, k))->tp_dict;
      PyObject* name = nullptr;
      PyObject* value = nullptr;
      for (Py_ssize_t at = 0; names != nullptr && PyDict_Next(names, &at, &name, &value) != 0;) {
        if (Py_IS_TYPE(value, &PyGetSetDescr_Type) && to_string(name).starts_with("_raw_saved_")) {
          entry->second.push_back(value);
        }
      }
    }
    return entry->second;
  }

  static py::object steal(PyObject* object) {
    if (object == nullptr) {
      PyErr_Clear();
    }
    return py::reinterpret_steal<py::object>(object);
  }

  void look_at_storage(const void* data, const GraphRoot& root) {
    if (wanted_.contains(data)) {
      found.try_emplace(data, root);
    }
  }

  // One saved tensor, a tuple of them, or what a hook has made of one.
  void look_at(const py::object& saved, const GraphRoot& root) {
    if (!saved) {
      return;
    }
    if (is_tensor(saved.ptr())) {
      look_at_storage(storage_of(saved.ptr()), root);
      look_at_storage(gradient_storage_of(saved.ptr()), root);
    } else if (PyTuple_CheckExact(saved.ptr()) || PyList_CheckExact(saved.ptr())) {
      for (const auto& item : own_items(saved.ptr())) {
        look_at(py::reinterpret_borrow<py::object>(item), root);
      }
    } else if (static PyTypeObject* const type = type_named("torch._C._autograd", "SavedTensor");
               type != nullptr && Py_IS_TYPE(saved.ptr(), type)) {
      look_at(steal(PyObject_GetAttrString(saved.ptr(), "data")), root);
    }
  }

  const std::unordered_set<const void*>& wanted_;
  std::unordered_set<Node*> seen_;
  std::vector<NodePointer> kept_;
  std::unordered_map<PyTypeObject*, std::vector<PyObject*>> getters_;
};

struct Graph {
  GraphRoot root;
  NodePointer node;
};

std::vector<Graph> graphs_of(PyObject* tensor) {
  const auto& variable = THPVariable_Unpack(tensor);
  std::vector<Graph> graphs;
  const auto add = [&](const at::Tensor& output, bool is_gradient) {
    if (auto node = graph_of(output); node != nullptr) {
      graphs.push_back({{tensor, node->name(), is_gradient}, std::move(node)});
    }
  };
  add(variable, false);
  if (graphs.empty()) {
    add(gradient_of(tensor), true);
  }
  return graphs;
}

}  // namespace

NodePointer graph_of(const at::Tensor& tensor) {
  const auto* const meta =
      tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
  if (meta == nullptr) {
    return nullptr;
  }
  const std::lock_guard lock(meta->mutex_);
  return meta->grad_fn_;
}

at::Tensor gradient_of(PyObject* tensor) {
  const auto& variable = THPVariable_Unpack(tensor);
  const auto* const meta =
      variable.defined() ? torch::autograd::impl::get_autograd_meta(variable) : nullptr;
  return meta == nullptr ? at::Tensor() : meta->grad_;
}

const void* storage_of(PyObject* tensor) {
  return storage_of(THPVariable_Unpack(tensor));
}

const void* gradient_storage_of(PyObject* tensor) {
  return storage_of(gradient_of(tensor));
}

// Without asking the tensor, whose class may be the program's.
const void* storage_of(const at::Tensor& tensor) {
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!tensor.defined() || !storage) {
    return nullptr;
  }
  auto* const impl = storage.unsafeGetStorageImpl();
  const auto device = impl->device_type();
  const bool is_tracked = device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
  return is_tracked ? impl->_mutable_data_ptr_no_checks().get() : nullptr;
}

bool has_graph(PyObject* tensor) {
  return !graphs_of(tensor).empty();
}

std::unordered_map<const void*, GraphRoot> find_graph_roots(
    const std::vector<PyObject*>& tensors, const std::unordered_set<const void*>& wanted) {
  std::vector<Graph> graphs;
  for (PyObject* const tensor : tensors) {
    const auto own = graphs_of(tensor);
    graphs.insert(graphs.end(), own.begin(), own.end());
  }
  // A graph that is part of another was made before it.
  std::stable_sort(graphs.begin(), graphs.end(), [](const Graph& a, const Graph& b) {
    return a.node->sequence_nr() < b.node->sequence_nr();
  });
  Walk walk(wanted);
  for (const auto& graph : graphs) {
    walk.from(graph.root, graph.node);
  }
  return std::move(walk.found);
}

}  // namespace brimful
