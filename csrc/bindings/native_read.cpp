#include "bindings/native_read.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Size.h>

#include <string_view>

#include "base/one_line.h"

namespace brimful {
namespace {

constexpr size_t kLongestKey = 40;
constexpr int kDeepestKey = 3;

py::object taken(PyObject* object) {
  if (object == nullptr) {
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(object);
}

// What a type in C or `__slots__` reads; not a property, which is a function of the program's.
bool is_native(PyObject* descriptor) {
  return Py_IS_TYPE(descriptor, &PyMemberDescr_Type) || Py_IS_TYPE(descriptor, &PyGetSetDescr_Type);
}

py::object read_descriptor(PyObject* descriptor, PyObject* object) {
  return taken(
      Py_TYPE(descriptor)
          ->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object))));
}

// By the first class that has the name, as Python finds it, without the metaclass.
py::object class_attribute(PyTypeObject* type, PyObject* name) {
  for (Py_ssize_t k = 0; type->tp_mro != nullptr && k < PyTuple_GET_SIZE(type->tp_mro); ++k) {
    auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, k));
#if PY_VERSION_HEX >= 0x030C0000
    const auto names = py::reinterpret_steal<py::object>(PyType_GetDict(base));
#else
    const auto names = py::reinterpret_borrow<py::object>(base->tp_dict);
#endif
    PyObject* const found = names ? PyDict_GetItemWithError(names.ptr(), name) : nullptr;
    if (found != nullptr) {
      return py::reinterpret_borrow<py::object>(found);
    }
    PyErr_Clear();
  }
  return {};
}

bool is_plain(PyObject* key) {
  return key == Py_None || PyUnicode_CheckExact(key) || PyLong_CheckExact(key) ||
         PyFloat_CheckExact(key) || PyBool_Check(key) || PyBytes_CheckExact(key) ||
         THPDevice_Check(key) || THPDtype_Check(key);
}

std::string whole_key_text(PyObject* key, int depth) {
  const bool is_tuple = PyTuple_CheckExact(key) || THPSize_Check(key);
  if (is_tuple && depth < kDeepestKey) {
    std::string text = "(";
    const auto length = PyTuple_GET_SIZE(key);
    for (Py_ssize_t k = 0; k < length && text.size() <= kLongestKey; ++k) {
      text += (k > 0 ? ", " : "") + whole_key_text(PyTuple_GET_ITEM(key, k), depth + 1);
    }
    return text + (length == 1 ? ",)" : ")");
  }
  const auto shown = is_plain(key) ? taken(PyObject_Repr(key)) : py::object();
  return shown ? to_string(shown.ptr()) : "<" + type_name(key) + ">";
}

}  // namespace

std::string to_string(PyObject* name) {
  if (!PyUnicode_Check(name)) {
    return "<" + type_name(name) + ">";
  }
  const auto bytes = taken(PyUnicode_AsEncodedString(name, "utf-8", "backslashreplace"));
  return bytes ? one_line({PyBytes_AS_STRING(bytes.ptr()),
                           static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr()))})
               : "?";
}

std::string error_text(const py::error_already_set& error) {
  const auto text = taken(PyObject_Str(error.value().ptr()));
  const auto message = text ? to_string(text.ptr()) : "";
  return type_name(error.value().ptr()) + (message.empty() ? "" : ": " + message);
}

std::string message_of(PyObject* error) {
  const auto text = taken(PyObject_Str(error));
  const auto bytes = text
                         ? taken(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"))
                         : py::object();
  return bytes ? as_utf8({PyBytes_AS_STRING(bytes.ptr()),
                          static_cast<size_t>(PyBytes_GET_SIZE(bytes.ptr()))})
               : "<unprintable " + type_name(error) + ">";
}

std::string type_name(PyObject* object) {
  return one_line(Py_TYPE(object)->tp_name);
}

std::string key_text(PyObject* key) {
  const auto text = whole_key_text(key, 0);
  const auto shown = first_bytes(text, kLongestKey);
  return std::string(shown) + (shown.size() < text.size() ? "..." : "");
}

py::object own_dict(PyObject* object) {
  if (PyType_Check(object)) {
    return {};
  }
  auto attributes = taken(PyObject_GenericGetDict(object, nullptr));
  return attributes && PyDict_Check(attributes.ptr()) ? attributes : py::object();
}

py::object own_attribute(PyObject* object, const char* name) {
  const auto key = taken(PyUnicode_FromString(name));
  if (!key) {
    return {};
  }
  const auto in_class = class_attribute(Py_TYPE(object), key.ptr());
  if (in_class && is_native(in_class.ptr())) {
    return read_descriptor(in_class.ptr(), object);
  }
  const auto attributes = own_dict(object);
  PyObject* const found =
      attributes ? PyDict_GetItemWithError(attributes.ptr(), key.ptr()) : nullptr;
  if (found == nullptr) {
    PyErr_Clear();
  }
  return py::reinterpret_borrow<py::object>(found);
}

std::string slot_name(PyObject* object, PyObject* value) {
  PyObject* const bases = Py_TYPE(object)->tp_mro;
  for (Py_ssize_t k = 0; bases != nullptr && k < PyTuple_GET_SIZE(bases); ++k) {
    const auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, k));
    if ((base->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || base->tp_dict == nullptr) {
      continue;  // C's own fields have names of C's own
    }
    PyObject* name = nullptr;
    PyObject* member = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(base->tp_dict, &at, &name, &member) != 0;) {
      if (Py_IS_TYPE(member, &PyMemberDescr_Type) &&
          read_descriptor(member, object).is(py::handle(value))) {
        return to_string(name);
      }
    }
  }
  return "";
}

PyTypeObject* type_named(const char* module, const char* name) {
  // Of modules that are never unloaded; a borrowed type stays.
  const auto imported = taken(PyImport_ImportModule(module));
  const auto type = imported ? taken(PyObject_GetAttrString(imported.ptr(), name)) : py::object();
  return type && PyType_Check(type.ptr()) ? reinterpret_cast<PyTypeObject*>(type.ptr()) : nullptr;
}

bool is_deque(PyObject* object) {
  static PyTypeObject* const type = type_named("_collections", "deque");
  return type != nullptr && PyObject_TypeCheck(object, type) != 0;
}

Py_ssize_t sequence_length(PyObject* sequence) {
  if (PyList_Check(sequence)) {
    return PyList_GET_SIZE(sequence);
  }
  if (PyTuple_Check(sequence)) {
    return PyTuple_GET_SIZE(sequence);
  }
  static PyTypeObject* const deque = type_named("_collections", "deque");
  return deque->tp_as_sequence->sq_length(sequence);
}

py::object sequence_item(PyObject* sequence, Py_ssize_t index) {
  if (PyList_Check(sequence)) {
    return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(sequence, index));
  }
  if (PyTuple_Check(sequence)) {
    return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(sequence, index));
  }
  static PyTypeObject* const deque = type_named("_collections", "deque");
  return taken(deque->tp_as_sequence->sq_item(sequence, index));
}

py::list own_items(PyObject* container) {
  py::list items;
  if (PyDict_Check(container)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(container, &at, &key, &value) != 0;) {
      items.append(py::handle(value));
    }
  } else if (PyList_Check(container) || PyTuple_Check(container)) {
    for (Py_ssize_t k = 0; k < sequence_length(container); ++k) {
      items.append(sequence_item(container, k));
    }
  }
  return items;
}

}  // namespace brimful
