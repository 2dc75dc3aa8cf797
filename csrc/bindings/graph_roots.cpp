#include "bindings/graph_roots.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace brimful {
namespace {

/// Walks graphs by Python's own view of their nodes, which alone names what each has saved.
class Walk {
 public:
  Walk(const std::unordered_set<const void*>& wanted) : wanted_(wanted) {}

  void from(const GraphRoot& root, const py::object& node) {
    std::vector<py::object> ahead{node};
    while (!ahead.empty()) {
      const py::object at = std::move(ahead.back());
      ahead.pop_back();
      if (at.is_none() || !seen_.insert(at.ptr()).second) {
        continue;
      }
      kept_.push_back(at);  // so that no other node gets its address
      for (const auto& name : saved_names(at)) {
        look_at(at.attr(name.c_str()), root);
      }
      for (const auto& edge : py::tuple(at.attr("next_functions"))) {
        ahead.push_back(edge[py::int_(0)]);
      }
    }
  }

  std::unordered_map<const void*, GraphRoot> found;

 private:
  const std::vector<std::string>& saved_names(const py::object& node) {
    const auto type = py::type::of(node);
    auto [entry, is_new] = names_.try_emplace(type.ptr());
    if (is_new) {
      for (const auto& name : py::list(py::module_::import("builtins").attr("dir")(type))) {
        auto text = name.cast<std::string>();
        if (text.starts_with("_raw_saved_")) {
          entry->second.push_back(std::move(text));
        }
      }
    }
    return entry->second;
  }

  // One saved tensor, a tuple of them, or what a hook has made of one.
  void look_at(const py::object& saved, const GraphRoot& root) {
    if (THPVariable_Check(saved.ptr())) {
      const void* const data = storage_of(saved.ptr());
      if (wanted_.contains(data)) {
        found.try_emplace(data, root);
      }
    } else if (py::isinstance<py::tuple>(saved) || py::isinstance<py::list>(saved)) {
      for (const auto& item : saved) {
        look_at(py::reinterpret_borrow<py::object>(item), root);
      }
    } else if (!saved.is_none() && py::hasattr(saved, "unpack_hook")) {
      look_at(saved.attr("data"), root);
    }
  }

  const std::unordered_set<const void*>& wanted_;
  std::unordered_set<PyObject*> seen_;
  std::vector<py::object> kept_;
  std::unordered_map<PyObject*, std::vector<std::string>> names_;  // by type
};

struct Graph {
  GraphRoot root;
  at::Tensor output;
};

std::vector<Graph> graphs_of(PyObject* tensor) {
  const auto& variable = THPVariable_Unpack(tensor);
  std::vector<Graph> graphs;
  const auto add = [&](const at::Tensor& output, bool is_gradient) {
    if (output.defined() && output.grad_fn() != nullptr) {
      graphs.push_back({{tensor, output.grad_fn()->name(), is_gradient}, output});
    }
  };
  add(variable, false);
  if (variable.defined() && variable.is_leaf()) {
    add(variable.grad(), true);
  }
  return graphs;
}

}  // namespace

const void* storage_of(PyObject* tensor) {
  const auto& variable = THPVariable_Unpack(tensor);
  const auto* const impl = variable.unsafeGetTensorImpl();
  if (!variable.defined() || !impl->has_storage()) {
    return nullptr;
  }
  const auto device = impl->device_type();
  const bool is_tracked = device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
  return is_tracked ? variable.storage().data() : nullptr;
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
    return a.output.grad_fn()->sequence_nr() < b.output.grad_fn()->sequence_nr();
  });
  Walk walk(wanted);
  for (const auto& graph : graphs) {
    walk.from(graph.root, py::cast(graph.output).attr("grad_fn"));
  }
  return std::move(walk.found);
}

}  // namespace brimful
