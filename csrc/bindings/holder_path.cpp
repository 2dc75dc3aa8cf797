#include "bindings/holder_path.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "bindings/graph_roots.h"
#include "bindings/native_read.h"

namespace brimful {
namespace {

using probes::Holder;
using probes::HolderKind;

// What an object may refer to beside its attributes.
constexpr std::array kInnerNames{"__closure__", "__defaults__", "__kwdefaults__", "__self__",
                                 "__func__",    "__wrapped__",  "__traceback__",  "__cause__",
                                 "__context__", "tb_frame",     "tb_next",        "gi_frame",
                                 "cr_frame",    "func",         "args",           "keywords"};

bool is_attribute(PyObject* object, const char* name, PyObject* value) {
  return own_attribute(object, name).is(py::handle(value));
}

// Its getters would ask __torch_function__ of a class of the program's.
std::string name_within_tensor(PyObject* object, PyObject* value) {
  if (reinterpret_cast<THPVariable*>(object)->backward_hooks == value) {
    return "_backward_hooks";
  }
  if (!is_tensor(value)) {
    return "";
  }
  const auto& inner = THPVariable_Unpack(value);
  return inner.defined() && gradient_of(object).is_same(inner) ? "grad" : "_base";
}

// Of an object whose attributes stand in it, without a dict of their own; or one of its inner names.
std::string name_within(PyObject* object, PyObject* value) {
  const py::object attributes = own_dict(object);
  if (attributes && attributes.ptr() != value) {
    if (PyObject* const key = key_of(attributes.ptr(), value); key != nullptr) {
      return to_string(key);
    }
  }
  if (attributes && attributes.ptr() == value) {
    return "__dict__";
  }
  if (auto slot = slot_name(object, value); !slot.empty()) {
    return slot;
  }
  if (is_tensor(object)) {
    return name_within_tensor(object, value);
  }
  for (const char* const name : kInnerNames) {
    if (is_attribute(object, name, value)) {
      return name;
    }
  }
  return "";
}

bool is_numpy(PyObject* object) {
  return std::string_view(Py_TYPE(object)->tp_name) == "numpy.ndarray";
}

/// Builds the path, a step at a time.
class PathWriter {
 public:
  explicit PathWriter(Holder& holder) : holder_(holder) {}

  void begin(const std::string& name) {
    path_ = name;
    is_output_ = is_output(name);
  }

  void go(PyObject* before, PyObject* parent, PyObject* child) {
    if (PyDict_Check(parent)) {
      through_dict(before, parent, child);
    } else if (PyList_Check(parent) || PyTuple_Check(parent) || is_deque(parent)) {
      through_sequence(before, parent, child);
    } else if (PyAnySet_Check(parent)) {
      grows(HolderKind::sequence, PySet_GET_SIZE(parent));
      path_ += "{...}";
    } else if (PyFrame_Check(parent)) {
      path_ += "." + local_name(parent, child);
    } else if (PyCell_Check(parent)) {
      // named by the function that closes over it
    } else if (is_numpy(parent)) {
      holder_.numpy = true;  // on a tensor, or on an array that is
    } else if (is_cache(parent)) {
      through_cache(parent);
    } else {
      through_object(parent, child);
    }
  }

  void finish() {
    holder_.path = path_;
    holder_.container = container_.empty() ? path_ : container_;
    if (is_output_) {
      holder_.kind = HolderKind::notebook;
      holder_.container = "Out";
    } else if (holder_.kind == HolderKind::unknown) {
      holder_.kind =
          path_.find('.') == std::string::npos ? HolderKind::variable : HolderKind::attribute;
    }
  }

 private:
  static bool is_cache(PyObject* object) {
    static PyTypeObject* const type = type_named("_functools", "_lru_cache_wrapper");
    return type != nullptr && PyObject_TypeCheck(object, type) != 0;
  }

  // A notebook keeps what cell 12 returns as _12 as well as Out[12].
  static bool is_output(const std::string& name) {
    return name.size() > 1 && name.find_first_not_of("0123456789", 1) == std::string::npos &&
           name[0] == '_';
  }

  // What names a way of its own wins over the containers on it; of these, the longest is what grows.
  void is_of(HolderKind kind) {
    holder_.kind = kind;
    fixed_ = true;
  }
  void grows(HolderKind kind, int64_t length) {
    if (length > holder_.length) {
      container_ = path_;
      holder_.length = length;
      holder_.kind = fixed_ ? holder_.kind : kind;
    }
  }

  void through_dict(PyObject* before, PyObject* dict, PyObject* child) {
    PyObject* const key = key_of(dict, child);
    const bool attributes =
        before != nullptr && (PyType_Check(before) || own_dict(before).is(py::handle(dict)));
    if (key == nullptr) {
      path_ += " (as a key)";
      grows(HolderKind::mapping, PyDict_GET_SIZE(dict));
    } else if ((attributes || modules_) && PyUnicode_Check(key)) {
      modules_ = false;
      step_into(to_string(key));
    } else {
      if (path_ == "Out" || path_ == "_oh") {
        is_of(HolderKind::notebook);
      }
      grows(HolderKind::mapping, PyDict_GET_SIZE(dict));
      path_ += "[" + key_text(key) + "]";
    }
  }

  static py::object maxlen_of(PyObject* deque) {
    static PyTypeObject* const type = type_named("_collections", "deque");
    static PyObject* const descriptor = PyDict_GetItemString(type->tp_dict, "maxlen");
    return py::reinterpret_steal<py::object>(
        Py_TYPE(descriptor)->tp_descr_get(descriptor, deque, reinterpret_cast<PyObject*>(type)));
  }

  void through_sequence(PyObject* before, PyObject* sequence, PyObject* child) {
    const auto length = static_cast<int64_t>(sequence_length(sequence));
    int64_t index = 0;
    while (index < length && !sequence_item(sequence, index).is(py::handle(child))) {
      ++index;
    }
    if (before != nullptr && PyFunction_Check(before) &&
        PyFunction_GetClosure(before) == sequence) {
      const auto names = py::reinterpret_steal<py::object>(
          PyCode_GetFreevars(reinterpret_cast<PyCodeObject*>(PyFunction_GetCode(before))));
      path_ += index < length ? "." + to_string(sequence_item(names.ptr(), index).ptr()) : "";
      return;
    }
    if (!PyTuple_Check(sequence)) {
      const auto before_length = holder_.length;
      grows(HolderKind::sequence, length);
      if (holder_.length != before_length) {
        holder_.bounded = is_deque(sequence) && !maxlen_of(sequence).is_none();
      }
    }
    path_ += "[" + std::to_string(index) + "]";
  }

  void through_cache(PyObject* cache) {
    constexpr int64_t kSmall = 16;
    is_of(HolderKind::lru_cache);
    container_ = path_;
    // Of its own class, whatever the program has put into it: (hits, misses, maxsize, currsize).
    const auto info = py::reinterpret_steal<py::object>(
        PyObject_CallMethod(reinterpret_cast<PyObject*>(Py_TYPE(cache)), "cache_info", "O", cache));
    if (!info || !PyTuple_Check(info.ptr()) || sequence_length(info.ptr()) != 4) {
      PyErr_Clear();
      return;
    }
    const py::object most = sequence_item(info.ptr(), 2);
    holder_.bounded = PyLong_Check(most.ptr()) && PyLong_AsLongLong(most.ptr()) <= kSmall;
    holder_.length = PyLong_AsLongLong(sequence_item(info.ptr(), 3).ptr());
    PyErr_Clear();
  }

  void through_object(PyObject* object, PyObject* child) {
    if (PyType_Check(object) && PyDict_Check(child)) {
      return;  // a class's own, which its __dict__ only shows
    }
    const auto name = name_within(object, child);
    if (name == "__closure__") {
      is_of(holder_.kind == HolderKind::hook ? HolderKind::hook : HolderKind::closure);
    } else if (name == "tb_frame") {
      is_of(HolderKind::traceback);
    } else if (name != "__dict__") {
      step_into(name.empty() ? "<" + type_name(object) + ">" : name);
    }
  }

  void step_into(const std::string& name) {
    if (name == "_modules" || name == "_parameters" ||
        name == "_buffers") {  // model.fc, model.weight
      modules_ = true;
      return;
    }
    if (name.ends_with("_hooks") && name.starts_with('_')) {
      is_of(HolderKind::hook);
      container_ = path_ + "." + name;
    }
    path_ += "." + name;
  }

  Holder& holder_;
  std::string path_;
  std::string container_;
  bool fixed_ = false;
  bool is_output_ = false;
  bool modules_ = false;
};

/// An optimizer's state has one entry for each parameter that it steps, and is full when all have been stepped.
bool is_state_of_parameters(const std::vector<PyObject*>& chain) {
  auto* const optimizers = type_named("torch.optim", "Optimizer");
  for (PyObject* const object : chain) {
    if (optimizers == nullptr || PyType_IsSubtype(Py_TYPE(object), optimizers) == 0) {
      continue;
    }
    const py::object state = own_attribute(object, "state");
    const py::object groups = own_attribute(object, "param_groups");
    if (!state || !groups || !PyDict_Check(state.ptr()) ||
        std::find(chain.begin(), chain.end(), state.ptr()) == chain.end()) {
      return false;
    }
    Py_ssize_t parameters = 0;
    for (const auto& group : own_items(groups.ptr())) {
      PyObject* const own =
          PyDict_Check(group.ptr()) ? PyDict_GetItemString(group.ptr(), "params") : nullptr;
      parameters += own != nullptr && PyList_Check(own) ? PyList_GET_SIZE(own) : 0;
    }
    return PyDict_GET_SIZE(state.ptr()) <= parameters;
  }
  return false;
}

}  // namespace

Holder describe_chain(const HolderChain& found) {
  Holder holder;
  const auto& chain = found.chain;
  if (chain.empty()) {
    return holder;
  }
  PathWriter writer(holder);
  if (found.root) {
    holder.root = found.root->scope;
    writer.begin(found.root->name);
  } else {
    holder.root = "in a reference cycle";
    writer.begin(type_name(chain.front()));
  }
  for (size_t i = 0; i + 1 < chain.size(); ++i) {
    writer.go(i == 0 ? nullptr : chain[i - 1], chain[i], chain[i + 1]);
  }
  writer.finish();
  if (!found.root) {
    holder.kind = HolderKind::cycle;
  } else if (is_state_of_parameters(chain)) {
    holder.bounded = true;
  }
  return holder;
}

}  // namespace brimful
