#include "bindings/python_heap.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

namespace brimful {
namespace {

struct Visit {
  const std::unordered_set<PyObject*>* wanted;
  PyObject* owner;
  std::unordered_map<PyObject*, std::vector<PyObject*>>* found;
};

int visit(PyObject* object, void* raw) {
  auto& self = *static_cast<Visit*>(raw);
  if (self.wanted->contains(object)) {
    auto& owners = (*self.found)[object];
    if (owners.empty() || owners.back() != self.owner) {
      owners.push_back(self.owner);
    }
  }
  return 0;
}

void traverse(PyObject* object, visitproc fn, void* state) {
  if (const auto of_type = Py_TYPE(object)->tp_traverse; of_type != nullptr) {
    of_type(object, fn, state);
  }
}

/// Objects that the collector manages, each once.
struct Reached {
  std::unordered_set<PyObject*> seen;
  std::vector<PyObject*> found;
};

int reach(PyObject* object, void* raw) {
  auto& self = *static_cast<Reached*>(raw);
  if (PyObject_GC_IsTracked(object) != 0 && self.seen.insert(object).second) {
    self.found.push_back(object);
  }
  return 0;
}

// A function's frame; of others the variables are the globals, or a class's.
bool is_function(py::handle frame) {
  constexpr int kOptimized = 0x1;  // CO_OPTIMIZED
  return (frame.attr("f_code").attr("co_flags").cast<int>() & kOptimized) != 0;
}

template <typename Fn>
void for_each_local(py::handle frame, const Fn& fn) {
  const py::object locals = frame.attr("f_locals");
  for (const auto& item : py::list(locals.attr("items")())) {
    fn(item[py::int_(0)], item[py::int_(1)]);
  }
  // Before Python 3.13 the frame keeps this copy of its variables: emptied, lest the search itself hold tensors, unless
  // the program holds the copy as well.
  constexpr Py_ssize_t kFrameAndHere = 2;
  if (PyDict_CheckExact(locals.ptr()) && Py_REFCNT(locals.ptr()) == kFrameAndHere) {
    PyDict_Clear(locals.ptr());
  }
}

std::string folder_of(const char* package) {
  const py::object file = py::module_::import(package).attr("__file__");
  const auto path = file.cast<std::string>();
  return path.substr(0, path.find_last_of('/') + 1);
}

/// Of all threads, the innermost first; none of torch's and brimful's own.
template <typename Fn>
void for_each_frame(const Fn& fn) {
  const auto torch = folder_of("torch");
  const auto own = folder_of("brimful");
  const py::dict threads = py::module_::import("sys").attr("_current_frames")();
  for (const auto& [thread, innermost] : threads) {
    for (py::object frame = py::reinterpret_borrow<py::object>(innermost); !frame.is_none();
         frame = frame.attr("f_back")) {
      const auto file = frame.attr("f_code").attr("co_filename").cast<std::string>();
      if (!file.starts_with(torch) && !file.starts_with(own)) {
        fn(frame);
      }
    }
  }
}

}  // namespace

PythonHeap::PythonHeap(const PythonRoots& roots)
    : objects_(py::module_::import("gc").attr("get_objects")()) {
  if (py::module_::import("gc").attr("get_freeze_count")().cast<int64_t>() > 0) {
    add_frozen(roots.objects());
  }
}

void PythonHeap::add_frozen(const std::vector<py::object>& roots) {
  Reached reached{{objects_.ptr()}, {}};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects_.ptr()); ++i) {
    reached.seen.insert(PyList_GET_ITEM(objects_.ptr(), i));
  }
  for (const auto& root : roots) {
    reach(root.ptr(), &reached);
  }
  const auto listed = PyList_GET_SIZE(objects_.ptr());
  for (Py_ssize_t i = 0; i < listed; ++i) {
    traverse(PyList_GET_ITEM(objects_.ptr(), i), &reach, &reached);
  }
  for (size_t i = 0; i < reached.found.size(); ++i) {
    traverse(reached.found[i], &reach, &reached);
  }
  for (PyObject* const object : reached.found) {
    objects_.append(py::handle(object));
  }
}

std::vector<PyObject*> PythonHeap::tensors() const {
  std::vector<PyObject*> found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects_.ptr()); ++i) {
    PyObject* const object = PyList_GET_ITEM(objects_.ptr(), i);
    if (is_tensor(object)) {
      found.push_back(object);
    }
  }
  return found;
}

std::unordered_map<PyObject*, std::vector<PyObject*>> PythonHeap::referrers(
    const std::unordered_set<PyObject*>& wanted) const {
  std::unordered_map<PyObject*, std::vector<PyObject*>> found;
  Visit state{&wanted, nullptr, &found};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects_.ptr()); ++i) {
    state.owner = PyList_GET_ITEM(objects_.ptr(), i);
    traverse(state.owner, &visit, &state);
  }
  return found;
}

PythonRoots::PythonRoots() {
  add_frames();
  add_modules();
}

void PythonRoots::add_frames() {
  for_each_frame([&](const py::object& frame) {
    if (!is_function(frame)) {
      return;
    }
    const auto function = frame.attr("f_code").attr("co_name").cast<std::string>();
    for_each_local(frame, [&](py::handle name, py::handle value) {
      locals_.try_emplace(value.ptr(),
                          PythonRoot{name.cast<std::string>(), "local of " + function + "()"});
      objects_.push_back(py::reinterpret_borrow<py::object>(value));
    });
  });
}

void PythonRoots::add_modules() {
  const py::dict modules = py::module_::import("sys").attr("modules");
  for (const auto& [name, module] : modules) {
    if (PyModule_Check(module.ptr())) {
      PyObject* const globals = PyModule_GetDict(module.ptr());
      modules_.emplace(globals, py::str(name).cast<std::string>());
      objects_.push_back(py::reinterpret_borrow<py::object>(globals));
    }
  }
  for_each_frame([&](const py::object& frame) {  // what exec and runpy run is in no module
    const py::object globals = frame.attr("f_globals");
    const py::object name = globals.attr("get")("__name__", "?");
    modules_.try_emplace(globals.ptr(), py::str(name).cast<std::string>());
    objects_.push_back(globals);
  });
}

const PythonRoot* PythonRoots::local(PyObject* object) const {
  const auto found = locals_.find(object);
  return found == locals_.end() ? nullptr : &found->second;
}

std::optional<PythonRoot> PythonRoots::global(PyObject* parent, PyObject* object) const {
  const auto module = modules_.find(parent);
  if (module == modules_.end()) {
    return std::nullopt;
  }
  PyObject* const key = key_of(parent, object);
  if (key == nullptr || !PyUnicode_Check(key)) {
    return std::nullopt;
  }
  return PythonRoot{py::str(key).cast<std::string>(), "global of " + module->second};
}

void for_each_variable(const std::function<void(const PythonRoot& root, py::handle value)>& fn) {
  const auto with_attributes = [&](const PythonRoot& root, py::handle value) {
    fn(root, value);
    const bool plain = !PyType_Check(value.ptr()) && !PyModule_Check(value.ptr()) &&
                       !PyCallable_Check(value.ptr()) && !is_tensor(value.ptr());
    PyObject* const attributes = plain ? PyObject_GenericGetDict(value.ptr(), nullptr) : nullptr;
    if (attributes == nullptr) {
      PyErr_Clear();
      return;
    }
    for (const auto& [name, inner] : py::reinterpret_steal<py::dict>(attributes)) {
      fn({root.name + "." + py::str(name).cast<std::string>(), root.scope}, inner);
    }
  };
  std::unordered_set<PyObject*> seen;
  for_each_frame([&](const py::object& frame) {
    if (is_function(frame)) {
      const auto function = frame.attr("f_code").attr("co_name").cast<std::string>();
      for_each_local(frame, [&](py::handle name, py::handle value) {
        with_attributes({name.cast<std::string>(), "local of " + function + "()"}, value);
      });
    }
    const py::dict globals = frame.attr("f_globals");
    if (seen.insert(globals.ptr()).second) {
      const auto scope =
          "global of " + py::str(globals.attr("get")("__name__", "?")).cast<std::string>();
      for (const auto& [name, value] : globals) {
        with_attributes({py::str(name).cast<std::string>(), scope}, value);
      }
    }
  });
}

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

std::string local_name(py::handle frame, PyObject* value) {
  std::string found;
  for_each_local(frame, [&](py::handle name, py::handle local) {
    if (local.ptr() == value && found.empty()) {
      found = name.cast<std::string>();
    }
  });
  return found;
}

PyObject* key_of(PyObject* dict, PyObject* value) {
  PyObject* key = nullptr;
  PyObject* seen = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &seen) != 0;) {
    if (seen == value) {
      return key;
    }
  }
  return nullptr;
}

}  // namespace brimful
