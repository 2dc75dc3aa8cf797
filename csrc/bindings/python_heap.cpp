#include "bindings/python_heap.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

#include "bindings/native_read.h"

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

py::object code_of(py::handle frame) {
  return py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
}

std::string function_of(py::handle frame) {
  return to_string(reinterpret_cast<PyCodeObject*>(code_of(frame).ptr())->co_name);
}

// A function's frame; of others the variables are the globals, or a class's.
bool is_function(py::handle frame) {
  const auto code = code_of(frame);
  return (reinterpret_cast<PyCodeObject*>(code.ptr())->co_flags & CO_OPTIMIZED) != 0;
}

template <typename Fn>
void for_each_entry(PyObject* dict, const Fn& fn) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
    fn(py::handle(key), py::handle(value));
  }
}

template <typename Fn>
void for_each_local(py::handle frame, const Fn& fn) {
  const auto locals = py::reinterpret_steal<py::object>(
      PyFrame_GetLocals(reinterpret_cast<PyFrameObject*>(frame.ptr())));
  if (!locals) {
    PyErr_Clear();
    return;
  }
  if (PyDict_Check(locals.ptr())) {
    for_each_entry(locals.ptr(), fn);
  } else if (is_function(
                 frame)) {  // its proxy, of Python 3.13 on; a class's may be the program's own
    for (const auto& item : py::list(locals.attr("items")())) {
      fn(item[py::int_(0)], item[py::int_(1)]);
    }
  }
  // Before Python 3.13 the frame keeps this copy of its variables: emptied, lest the search itself hold tensors, unless
  // the program holds the copy as well.
  constexpr Py_ssize_t kFrameAndHere = 2;
  if (is_function(frame) && PyDict_CheckExact(locals.ptr()) &&
      Py_REFCNT(locals.ptr()) == kFrameAndHere) {
    PyDict_Clear(locals.ptr());
  }
}

// "train", also where the globals are of a class of the program's.
std::string module_name(py::handle globals) {
  PyObject* const name = PyDict_GetItemString(globals.ptr(), "__name__");
  return name != nullptr ? to_string(name) : "?";
}

std::string folder_of(const char* package) {
  const py::object file = py::module_::import(package).attr("__file__");
  const auto path = to_string(file.ptr());
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
      const auto code = code_of(frame);
      const auto file = to_string(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
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
  arrays_.look(objects_, roots.objects());
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
  arrays_.add_referrers(wanted, found);
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
    const auto function = function_of(frame);
    for_each_local(frame, [&](py::handle name, py::handle value) {
      locals_.try_emplace(value.ptr(),
                          PythonRoot{to_string(name.ptr()), "local of " + function + "()"});
      objects_.push_back(py::reinterpret_borrow<py::object>(value));
    });
  });
}

void PythonRoots::add_modules() {
  for_each_entry(PyImport_GetModuleDict(), [&](py::handle name, py::handle module) {
    if (PyModule_Check(module.ptr())) {
      PyObject* const globals = PyModule_GetDict(module.ptr());
      modules_.emplace(globals, to_string(name.ptr()));
      objects_.push_back(py::reinterpret_borrow<py::object>(globals));
    }
  });
  for_each_frame([&](const py::object& frame) {  // what exec and runpy run is in no module
    const py::object globals = frame.attr("f_globals");
    modules_.try_emplace(globals.ptr(), module_name(globals));
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
  return PythonRoot{to_string(key), "global of " + module->second};
}

void for_each_tensor(const std::function<void(const PythonRoot& root, PyObject* tensor)>& fn) {
  const auto look_at = [&](py::handle name, py::handle value, const auto& scope) {
    if (is_tensor(value.ptr())) {
      fn({to_string(name.ptr()), scope()}, value.ptr());
      return;
    }
    const bool plain = !PyType_Check(value.ptr()) && !PyModule_Check(value.ptr()) &&
                       !PyCallable_Check(value.ptr());
    const auto attributes = plain ? own_dict(value.ptr()) : py::object();
    if (attributes) {
      for_each_entry(attributes.ptr(), [&](py::handle inner_name, py::handle inner) {
        if (is_tensor(inner.ptr())) {
          fn({to_string(name.ptr()) + "." + to_string(inner_name.ptr()), scope()}, inner.ptr());
        }
      });
    }
  };
  std::unordered_set<PyObject*> seen;
  for_each_frame([&](const py::object& frame) {
    if (is_function(frame)) {
      const auto scope = [&] { return "local of " + function_of(frame) + "()"; };
      for_each_local(frame,
                     [&](py::handle name, py::handle value) { look_at(name, value, scope); });
    }
    const py::object globals = frame.attr("f_globals");
    if (seen.insert(globals.ptr()).second) {
      const auto scope = [&] { return "global of " + module_name(globals); };
      for_each_entry(globals.ptr(),
                     [&](py::handle name, py::handle value) { look_at(name, value, scope); });
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
      found = to_string(name.ptr());
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
