#include "bindings/array_bases.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace brimful {
namespace {

constexpr int kMostBases = 8;

/// A pass over references. What it meets is only noted: nothing of Python's may run in it.
struct Pass {
  PyTypeObject* array = nullptr;
  PyObject* owner = nullptr;
  std::unordered_map<PyTypeObject*, bool> is_array;
  std::unordered_map<PyObject*, std::vector<PyObject*>> arrays;  // owners by array
  std::unordered_map<PyObject*, PyObject*> unlisted;             // their owners
  std::vector<PyObject*> ahead;
};

int meet(PyObject* object, void* raw) {
  auto& self = *static_cast<Pass*>(raw);
  auto* const type = Py_TYPE(object);
  const auto [known, is_new] = self.is_array.try_emplace(type, false);
  if (is_new) {
    known->second = PyType_IsSubtype(type, self.array) != 0;
  }
  if (known->second) {
    self.arrays[object].push_back(self.owner);
  } else if ((PyDict_CheckExact(object) || PyTuple_CheckExact(object)) &&
             PyObject_GC_IsTracked(object) == 0 &&
             self.unlisted.try_emplace(object, self.owner).second) {
    self.ahead.push_back(object);
  }
  return 0;
}

void look_into(Pass& pass, PyObject* object) {
  pass.owner = object;
  if (const auto traverse = Py_TYPE(object)->tp_traverse; traverse != nullptr) {
    traverse(object, &meet, &pass);
  }
}

Pass pass_over(PyTypeObject* array, const py::list& objects, const std::vector<py::object>& roots) {
  Pass pass;
  pass.array = array;
  for (const auto& root : roots) {
    meet(root.ptr(), &pass);
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    look_into(pass, PyList_GET_ITEM(objects.ptr(), i));
  }
  while (!pass.ahead.empty()) {
    PyObject* const object = pass.ahead.back();
    pass.ahead.pop_back();
    look_into(pass, object);
  }
  return pass;
}

}  // namespace

void ArrayBases::add(py::object array, const py::object& base_of) {
  std::vector<py::object> way{std::move(array)};
  for (int i = 0; i < kMostBases; ++i) {
    py::object base = base_of(way.back());
    if (THPVariable_Check(base.ptr())) {
      way.push_back(std::move(base));
      for (size_t k = 0; k + 1 < way.size(); ++k) {
        auto& on_it = arrays_[way[k + 1].ptr()];
        if (on_it.empty() || on_it.back() != way[k].ptr()) {
          on_it.push_back(way[k].ptr());
        }
      }
      kept_.insert(kept_.end(), way.begin(), way.end());
      return;
    }
    if (base.is_none()) {
      return;
    }
    way.push_back(std::move(base));
  }
}

void ArrayBases::look(py::list& objects, const std::vector<py::object>& roots) {
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("numpy")) {
    return;
  }
  try {
    const py::object array = modules["numpy"].attr("ndarray");
    if (!PyType_Check(array.ptr())) {
      return;
    }
    const auto pass = pass_over(reinterpret_cast<PyTypeObject*>(array.ptr()), objects, roots);
    std::vector<std::pair<py::object, std::vector<PyObject*>>>
        met;  // before anything of Python's runs
    met.reserve(pass.arrays.size());
    for (const auto& [object, owners] : pass.arrays) {
      met.emplace_back(py::reinterpret_borrow<py::object>(object), owners);
    }
    std::unordered_set<PyObject*> listed;
    for (const auto& [object, owners] : met) {
      for (PyObject* const owner : owners) {
        for (PyObject* at = owner; at != nullptr && pass.unlisted.contains(at);
             at = pass.unlisted.at(at)) {
          if (listed.insert(at).second) {
            objects.append(py::handle(at));
          }
        }
      }
    }
    // The type's own, whatever a subclass says.
    const py::object base_of = array.attr("base").attr("__get__");
    for (auto& [object, owners] : met) {
      add(object, base_of);
    }
    add_unlisted_tensors(objects);
  } catch (const py::error_already_set&) {  // a NumPy of another kind: its arrays have no names
  }
}

/// A tensor that gc.freeze() has put aside is met through its arrays alone.
void ArrayBases::add_unlisted_tensors(py::list& objects) const {
  std::unordered_set<PyObject*> tensors;
  for (const auto& [base, arrays] : arrays_) {
    if (THPVariable_Check(base)) {
      tensors.insert(base);
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()) && !tensors.empty(); ++i) {
    tensors.erase(PyList_GET_ITEM(objects.ptr(), i));
  }
  // NOLINTNEXTLINE(*-pointer-iteration-order): the heap has no order either
  for (PyObject* const tensor : tensors) {
    objects.append(py::handle(tensor));
  }
}

void ArrayBases::add_referrers(const std::unordered_set<PyObject*>& wanted,
                               std::unordered_map<PyObject*, std::vector<PyObject*>>& found) const {
  for (const auto& [base, arrays] : arrays_) {
    if (wanted.contains(base)) {
      auto& owners = found[base];
      owners.insert(owners.end(), arrays.begin(), arrays.end());
    }
  }
}

}  // namespace brimful
