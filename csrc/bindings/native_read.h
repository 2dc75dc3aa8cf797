#pragma once
#include <string>

#include "bindings/bindings.h"

/// Python objects, read without running any code of their classes: no property, `__getattr__`, `__len__`, `__repr__` or
/// `__torch_function__` of the program's is called, and nothing here throws for what it finds. With the GIL held.
namespace brimful {

/// A str on one line; what is no UTF-8 is escaped. Of something else "<its type>".
std::string to_string(PyObject* name);

/// "RuntimeError: what it says", on one line. Its text is asked for, and is left out where its class cannot say it.
std::string error_text(const py::error_already_set& error);

/// What an exception says, as UTF-8; "<unprintable ValueError>" where its class cannot say it. Its text is asked for.
std::string message_of(PyObject* error);

/// The name of its type, on one line.
std::string type_name(PyObject* object);

/// As in source: "'a'", "3", "(1, 2)"; at most 40 bytes. Of what could run code of the program's "<its type>".
std::string key_text(PyObject* key);

/// Where an object's own attributes are; null where it has no such dict.
py::object own_dict(PyObject* object);

/// An attribute that stands in the object or in a slot of it, or that a type written in C computes; null if there is none.
py::object own_attribute(PyObject* object, const char* name);

/// The name of the slot of an object that has this value; empty if none has.
std::string slot_name(PyObject* object, PyObject* value);

/// The type of this name; null where its module does not have it.
PyTypeObject* type_named(const char* module, const char* name);

bool is_deque(PyObject* object);

/// Length and items of a list, a tuple or a deque, or of an object whose class derives from them.
Py_ssize_t sequence_length(PyObject* sequence);
py::object sequence_item(PyObject* sequence, Py_ssize_t index);

/// The items of a list or a tuple, or the values of a dict, also of classes that derive from them; else none.
py::list own_items(PyObject* container);

}  // namespace brimful
