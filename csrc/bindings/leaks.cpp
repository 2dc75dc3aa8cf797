#include <brimful/log.h>
#include <brimful/probes/leak_finder.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>

#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "bindings/graph_roots.h"
#include "bindings/holder_path.h"
#include "bindings/native_read.h"

namespace brimful {
namespace {

using namespace probes;
using namespace py::literals;

/// What to look for above each storage: Python tensors on it, and the tensors whose graph saves it.
struct Targets {
  std::vector<PyObject*> objects;
  std::unordered_map<const void*, std::vector<size_t>> direct;  // places among the objects
  std::unordered_map<const void*, size_t> by_gradient;          // whose gradient it is
  std::unordered_map<const void*, size_t> by_graph;
  std::unordered_map<const void*, GraphRoot> roots;
};

// Those that have a graph and are held by something of Python: a tensor that a graph has saved may be a Python object
// that the graph alone holds.
std::vector<PyObject*> held_outputs(const std::vector<PyObject*>& tensors, const PythonHeap& heap,
                                    const PythonRoots& roots) {
  std::unordered_set<PyObject*> outputs;
  std::copy_if(tensors.begin(), tensors.end(), std::inserter(outputs, outputs.end()), has_graph);
  const auto referrers = heap.referrers(outputs);
  std::erase_if(outputs, [&](PyObject* tensor) {
    return !referrers.contains(tensor) && roots.local(tensor) == nullptr;
  });
  return {outputs.begin(), outputs.end()};
}

Targets targets_of(const PythonHeap& heap, const PythonRoots& roots,
                   const std::unordered_set<const void*>& wanted) {
  const auto tensors = heap.tensors();
  Targets targets;
  const auto add = [&](PyObject* object) {
    targets.objects.push_back(object);
    return targets.objects.size() - 1;
  };
  for (PyObject* const tensor : tensors) {
    if (const void* const data = storage_of(tensor); wanted.contains(data)) {
      targets.direct[data].push_back(add(tensor));
    }
    if (const void* const data = gradient_storage_of(tensor); wanted.contains(data)) {
      targets.by_gradient[data] = add(tensor);
    }
  }
  targets.roots = find_graph_roots(held_outputs(tensors, heap, roots), wanted);
  std::unordered_map<PyObject*, size_t> places;
  for (const auto& [data, root] : targets.roots) {
    const auto [entry, is_new] = places.try_emplace(root.tensor, 0);
    entry->second = is_new ? add(root.tensor) : entry->second;
    targets.by_graph[data] = entry->second;
  }
  return targets;
}

// Of a class of the program's it would ask that, so that one is none.
bool is_scalar(const at::Tensor& tensor) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  return tensor.defined() && !impl->is_python_dispatch() && impl->numel() == 1;
}

// None where only its class, which may be the program's, can say; nothing on the meta device.
std::optional<int64_t> own_bytes(const at::Tensor& tensor) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  if (!tensor.defined() || impl->is_python_dispatch()) {
    return std::nullopt;
  }
  return impl->device_type() == c10::DeviceType::Meta
             ? 0
             : impl->numel() * static_cast<int64_t>(impl->itemsize());
}

Holder holder_of(const HolderChain& chain, const at::Tensor& tensor) {
  Holder holder = describe_chain(chain);
  if (holder.kind != HolderKind::unknown) {
    holder.scalar = is_scalar(tensor);
    holder.has_graph = graph_of(tensor) != nullptr;
    holder.data = storage_of(tensor);
  }
  return holder;
}

/// A named holder of one of the storage's tensors, or of a tensor whose graph keeps it; else a cycle; else unknown.
Holder choose(const void* data, const Targets& targets, const std::vector<HolderChain>& chains) {
  Holder best;
  const auto consider = [&](size_t place, const GraphRoot* root) {
    Holder holder = holder_of(chains[place], THPVariable_Unpack(targets.objects[place]));
    if (root != nullptr && holder.kind != HolderKind::unknown) {
      holder.node = root->node;
      holder.is_gradient = root->is_gradient;
      holder.path += root->is_gradient ? ".grad" : "";
    }
    const bool better = best.kind == HolderKind::unknown ||
                        (best.kind == HolderKind::cycle && holder.kind != HolderKind::unknown);
    best = better ? holder : best;
  };
  if (const auto direct = targets.direct.find(data); direct != targets.direct.end()) {
    for (const size_t place : direct->second) {
      consider(place, nullptr);
    }
  }
  if (const auto leaf = targets.by_gradient.find(data); leaf != targets.by_gradient.end()) {
    const auto& tensor = THPVariable_Unpack(targets.objects[leaf->second]);
    Holder holder = holder_of(chains[leaf->second], tensor);
    const bool has_graph = graph_of(gradient_of(targets.objects[leaf->second])) != nullptr;
    if (best.kind == HolderKind::unknown && holder.kind != HolderKind::unknown && !has_graph) {
      // One for each tensor: it cannot pile up where the tensors do not.
      holder.bounded |= graph_of(tensor) == nullptr && !targets.direct.contains(storage_of(tensor));
      holder.path += ".grad";
      holder.has_graph = false;
      best = std::move(holder);
    }
  }
  if (const auto graph = targets.by_graph.find(data); graph != targets.by_graph.end()) {
    consider(graph->second, &targets.roots.at(data));
  }
  return best;
}

std::vector<Holder> search(const std::vector<const void*>& data) {
  const PythonRoots roots;
  const PythonHeap heap(roots);
  std::unordered_set<const void*> wanted(data.begin(), data.end());
  wanted.erase(nullptr);  // of no storage, or an empty one
  const auto targets = targets_of(heap, roots, wanted);
  const auto chains = find_chains(heap, roots, targets.objects);
  std::vector<Holder> holders;
  holders.reserve(data.size());
  for (const void* const storage : data) {
    holders.push_back(choose(storage, targets, chains));
  }
  return holders;
}

// The program does not see what goes wrong in a search.
template <typename Fn>
auto or_nothing(const char* what, const Fn& fn) -> decltype(fn()) {
  try {
    return fn();
  } catch (const py::error_already_set& error) {
    log(LogLevel::info, std::string(what) + ": " + error_text(error));
  } catch (const std::exception& error) {
    log(LogLevel::info, std::string(what) + ": " + error.what());
  }
  return {};
}

std::vector<Holder> find_holders(const std::vector<const void*>& data) {
  auto found = or_nothing("what holds memory was not found", [&] { return search(data); });
  found.resize(data.size());
  return found;
}

// Of how many sums a tensor is one: the first way through nodes that only add.
int64_t sum_length(const at::Tensor& tensor) {
  int64_t length = 0;
  auto node = graph_of(tensor);
  while (node != nullptr && node->name().starts_with("AddBackward")) {
    ++length;
    auto next = node->next_edge(0).function;
    if (next == nullptr || !next->name().starts_with("AddBackward")) {
      next = node->num_outputs() > 1 ? node->next_edge(1).function : nullptr;
    }
    node = std::move(next);
  }
  return length;
}

// Variables of running code, and attributes of what they are.
std::vector<LeakFinder::Sum> search_sums() {
  std::vector<LeakFinder::Sum> sums;
  for_each_tensor([&](const PythonRoot& root, PyObject* value) {
    const auto& tensor = THPVariable_Unpack(value);
    if (const auto length = sum_length(tensor); length > 1) {
      Holder holder;
      holder.kind = HolderKind::variable;
      holder.path = holder.container = root.name;
      holder.root = root.scope;
      holder.node = graph_of(tensor)->name();
      holder.scalar = is_scalar(tensor);
      holder.has_graph = true;
      holder.data = storage_of(value);
      sums.push_back({std::move(holder), length});
    }
  });
  return sums;
}

std::vector<LeakFinder::Sum> find_sums() {
  return or_nothing("sums were not looked for", search_sums);
}

}  // namespace

void bind_native_read(py::module_& m) {
  m.def(
      "_own_attribute",
      [](py::handle object, const char* name) -> py::object {
        auto found = own_attribute(object.ptr(), name);
        return found ? found : py::none();
      },
      "object"_a.none(true), "name"_a);
  m.def(
      "_own_items", [](py::handle container) { return own_items(container.ptr()); }, "container"_a);
  m.def(
      "_own_gradient",
      [](py::handle tensor) -> std::optional<at::Tensor> {
        const auto gradient = is_tensor(tensor.ptr()) ? gradient_of(tensor.ptr()) : at::Tensor();
        return gradient.defined() ? std::optional(gradient) : std::nullopt;
      },
      "tensor"_a);
  m.def(
      "_own_bytes", [](py::handle tensor) { return own_bytes(THPVariable_Unpack(tensor.ptr())); },
      "tensor"_a);
  m.def(
      "_type_name", [](py::handle object) { return type_name(object.ptr()); }, "object"_a);
  m.def(
      "_text", [](py::handle name) { return to_string(name.ptr()); }, "name"_a);
}

void bind_leaks(py::module_& m) {
  bind_native_read(m);
  m.def(
      "_who_holds",
      [](py::handle tensor) { return find_holders({storage_of(tensor.ptr())}).front(); },
      "tensor"_a);
  m.def(
      "_find_holders",
      [](const std::vector<uintptr_t>& data) {
        std::vector<const void*> storages;
        storages.reserve(data.size());
        for (const uintptr_t address : data) {
          storages.push_back(reinterpret_cast<const void*>(address));
        }
        return find_holders(storages);
      },
      "data"_a);
  py::class_<Holder>(m, "Holder", "What keeps memory alive, by the names of the program.")
      .def_property_readonly("kind", [](const Holder& holder) { return name_of(holder.kind); })
      .BRIMFUL_FIELDS(def_readonly, Holder, path, container, root, length, node);
  py::class_<Leak>(m, "Leak", "One cause of memory that grows from step to step.")
      .BRIMFUL_FIELDS(def_readonly, Leak, holder, sites, steps, bytes, bytes_per_step, filling,
                      copied)
      .def_property_readonly("advice", [](const Leak& leak) { return advice(leak); })
      .def("__str__", [](const Leak& leak) { return to_string(leak); })
      .def("__repr__", [](const Leak& leak) { return "<Leak: " + to_string(leak) + ">"; });
  py::class_<LeakFinder>(m, "_LeakFinder")
      .def(py::init([](int64_t steps, int64_t warm_up) {
             return std::make_unique<LeakFinder>(GrowthOptions{steps, warm_up}, find_holders,
                                                 find_sums);
           }),
           "steps"_a, "warm_up"_a)
      .def("check", &LeakFinder::check)
      .def("rest", &LeakFinder::rest)
      .def_property_readonly("leaks", &LeakFinder::leaks);
}

}  // namespace brimful
