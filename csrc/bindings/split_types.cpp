#include "bindings/split_types.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

#include "bindings/structure.h"

namespace brimful {
namespace {
constexpr const char* kBlockMaskModule = "brimful.sizer._block_mask";

// Leaked with the interpreter: they are used until it ends.
PyObject* own_splits = nullptr;   ///< by type: (rows_of, slice_rows)
PyObject* plain_types = nullptr;  ///< a tuple, for isinstance

/// Most parts of most batches, which need no look.
bool is_builtin(const py::handle& object) {
  PyObject* p = object.ptr();
  return THPVariable_CheckExact(p) || PyTuple_CheckExact(p) || PyList_CheckExact(p) ||
         PyDict_CheckExact(p) || PyUnicode_CheckExact(p) || PyLong_CheckExact(p) ||
         PyFloat_CheckExact(p) || p == Py_None;
}

py::object found_in(const py::handle& type) {
  const py::dict all = py::reinterpret_borrow<py::dict>(own_splits);
  for (const auto& base : type.attr("__mro__")) {
    if (all.contains(base)) {
      return all[base];
    }
  }
  return py::none();
}

bool is_instance(const py::handle& object, const char* module, const char* name) {
  const py::object modules = py::module_::import("sys").attr("modules");
  const py::object loaded = modules.attr("get")(module);
  return !loaded.is_none() && py::isinstance(object, loaded.attr(name));
}

void register_split(const py::object& type, const py::object& rows_of,
                    const py::object& slice_rows) {
  TORCH_CHECK_TYPE(PyType_Check(type.ptr()),
                   "a split is registered for a type (type: ", py::repr(type).cast<std::string>(),
                   "); pass the class itself");
  TORCH_CHECK_VALUE(
      rows_of.is_none() == slice_rows.is_none(),
      "rows_of and slice_rows go together (missing: ", rows_of.is_none() ? "rows_of" : "slice_rows",
      "); pass both, or neither for a type that every piece gets whole");
  for (const auto& [name, function] :
       {std::pair("rows_of", rows_of), std::pair("slice_rows", slice_rows)}) {
    TORCH_CHECK_TYPE(function.is_none() || PyCallable_Check(function.ptr()) != 0, name,
                     " must be callable (", name, ": ", py::repr(function).cast<std::string>(),
                     "); pass a function");
  }
  py::reinterpret_borrow<py::dict>(own_splits)[type] = py::make_tuple(rows_of, slice_rows);
}

void add_types(py::list& types, const char* module, std::initializer_list<const char*> names) {
  const auto loaded = py::module_::import(module);
  for (const auto* name : names) {
    if (py::hasattr(loaded, name)) {
      types.append(loaded.attr(name));
    }
  }
}

/// A function, a type, a module of torch's; what can be called and has entries all the same may have rows, as a batch of
/// graphs.
bool is_called_alone(const py::handle& object) {
  return PyType_Check(object.ptr()) || (PyCallable_Check(object.ptr()) != 0 &&
                                        (!py::hasattr(py::type::handle_of(object), "__len__") ||
                                         is_instance(object, "torch.nn", "Module")));
}
}  // namespace

std::optional<OwnSplit> own_split_of(const py::handle& object) {
  if (is_builtin(object)) {
    return std::nullopt;
  }
  const auto type = py::type::handle_of(object);
  py::object found = found_in(type);
  if (found.is_none() && is_block_mask(object)) {
    py::module_::import(kBlockMaskModule);  // registers it
    found = found_in(type);
  }
  if (found.is_none()) {
    return std::nullopt;
  }
  const auto pair = py::cast<py::tuple>(found);
  return OwnSplit{pair[0], pair[1]};
}

std::optional<int64_t> own_rows(const OwnSplit& own, const py::handle& object) {
  if (own.rows_of.is_none()) {
    return std::nullopt;
  }
  const py::object size = own.rows_of(object);
  if (size.is_none()) {
    return std::nullopt;
  }
  TORCH_CHECK_TYPE(PyIndex_Check(size.ptr()), "rows_of of a registered type returned no number (",
                   type_name(object), ": ", py::repr(size).cast<std::string>(),
                   "); return an int, or None for an object without rows");
  const auto rows = py::int_(size).cast<int64_t>();
  TORCH_CHECK_VALUE(rows >= 0, "rows_of of a registered type returned a negative number (",
                    type_name(object), ": ", rows, "); return how many rows it has");
  return rows;
}

py::object own_slice(const OwnSplit& own, const py::handle& object, int64_t begin, int64_t end) {
  return own_rows(own, object) ? own.slice_rows(object, begin, end)
                               : py::reinterpret_borrow<py::object>(object);
}

bool is_array(const py::handle& object) {
  return is_instance(object, "numpy", "ndarray");
}

bool is_plain(const py::handle& object) {
  PyObject* p = object.ptr();
  if (PyAnySet_Check(p)) {
    return std::all_of(object.begin(), object.end(), &is_plain);
  }
  return is_called_alone(object) || py::isinstance(object, py::handle(plain_types)) ||
         is_instance(object, "numpy", "generic") || is_instance(object, "numpy", "dtype");
}

bool is_block_mask(const py::handle& object) {
  return std::strcmp(Py_TYPE(object.ptr())->tp_name, "BlockMask") == 0 &&
         is_instance(object, "torch.nn.attention.flex_attention", "BlockMask");
}

py::object opened_block_mask(const py::handle& object) {
  return is_block_mask(object) ? py::module_::import(kBlockMaskModule).attr("opened")(object)
                               : py::reinterpret_borrow<py::object>(object);
}

py::object closed_block_mask(const py::object& object) {
  const bool is_opened = std::strcmp(Py_TYPE(object.ptr())->tp_name, "OpenedBlockMask") == 0;
  return is_opened ? py::module_::import(kBlockMaskModule).attr("closed")(object) : object;
}

void bind_split_types(py::module_& m) {
  own_splits = py::dict().release().ptr();
  py::list types;
  add_types(types, "builtins", {"str", "int", "float", "bytes", "bytearray", "range", "slice"});
  add_types(types, "types", {"NoneType", "EllipsisType", "ModuleType"});
  add_types(types, "numbers", {"Number"});
  add_types(types, "enum", {"Enum"});
  add_types(types, "datetime", {"date", "time", "timedelta", "tzinfo"});
  add_types(types, "pathlib", {"PurePath"});
  add_types(types, "re", {"Pattern"});
  add_types(types, "uuid", {"UUID"});
  add_types(types, "torch", {"dtype", "device", "layout", "memory_format", "Generator"});
  add_types(types, "torch.distributed", {"ProcessGroup"});
  plain_types = py::tuple(types).release().ptr();
  m.def("_register_split", &register_split, py::arg("type"), py::arg("rows_of"),
        py::arg("slice_rows"));
}

}  // namespace brimful
