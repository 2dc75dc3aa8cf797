#include "bindings/form_bytes.h"

#include "bindings/structure.h"

namespace brimful {
namespace {
using pipeline::FormReader;
using pipeline::FormWriter;
using pipeline::Tag;

bool write_number(const py::handle& object, FormWriter& writer) {
  PyObject* const p = object.ptr();
  if (PyBool_Check(p)) {
    writer.put(p == Py_True ? Tag::yes : Tag::no);
  } else if (PyLong_CheckExact(p)) {
    int overflow = 0;
    const auto value = PyLong_AsLongLongAndOverflow(p, &overflow);
    writer.put(overflow == 0 ? Tag::integer : Tag::number);
    overflow == 0 ? writer.put(static_cast<int64_t>(value))
                  : writer.put(py::str(object).cast<std::string>());
  } else if (PyFloat_CheckExact(p)) {
    writer.put(Tag::real);
    writer.put(PyFloat_AS_DOUBLE(p));
  } else if (PyComplex_CheckExact(p)) {
    writer.put(Tag::complex);
    writer.put(PyComplex_RealAsDouble(p));
    writer.put(PyComplex_ImagAsDouble(p));
  } else {
    return false;
  }
  return true;
}

bool is_a(const py::handle& object, const char* name) {
  return py::isinstance(object, py::module_::import("torch").attr(name));
}

bool write_leaf(const py::handle& object, FormWriter& writer) {
  const auto put = [&](Tag tag, const std::string& text) {
    writer.put(tag);
    writer.put(std::string_view(text));
    return true;
  };
  if (object.is_none()) {
    writer.put(Tag::none);
    return true;
  }
  if (PyUnicode_CheckExact(object.ptr())) {
    return put(Tag::text, object.cast<std::string>());
  }
  if (PyBytes_CheckExact(object.ptr())) {
    return put(Tag::bytes, object.cast<std::string>());
  }
  if (is_a(object, "dtype")) {
    return put(Tag::dtype, py::str(object).cast<std::string>().substr(sizeof("torch.") - 1));
  }
  if (is_a(object, "device")) {
    return put(Tag::device, py::str(object).cast<std::string>());
  }
  return write_number(object, writer);
}

void write_record_name(const py::handle& object, FormWriter& writer) {
  const auto type = py::type::handle_of(object);
  writer.put(Tag::record);
  writer.put(std::string_view(type.attr("__module__").cast<std::string>()));
  writer.put(std::string_view(type.attr("__qualname__").cast<std::string>()));
}

/// Looked up, never imported.
py::object type_of(const std::string& module, const std::string& name) {
  const auto modules = py::module_::import("sys").attr("modules");
  py::object found = modules.attr("get")(module);
  for (const auto& part : py::str(name).attr("split")(".")) {
    found = py::getattr(found, part, py::none());
  }
  const bool known =
      PyType_Check(found.ptr()) != 0 &&
      (py::hasattr(found, "__dataclass_fields__") ||
       PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(found.ptr()), &PyTuple_Type) != 0 ||
       PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(found.ptr()), &PyList_Type) != 0 ||
       py::module_::import("builtins")
           .attr("issubclass")(found, py::module_::import("collections.abc").attr("Mapping"))
           .cast<bool>());
  TORCH_CHECK_TYPE(known, "this process lacks a type that another process sent (type: ", module,
                   ".", name, "); import its module on all ranks");
  return found;
}

py::object make_record(const py::object& type, const py::list& keys, const py::list& values) {
  const bool is_mapping =
      py::isinstance(type, py::handle(reinterpret_cast<PyObject*>(&PyType_Type))) &&
      py::hasattr(type, "keys");
  if (is_mapping) {
    const py::dict entries(py::module_::import("builtins").attr("zip")(keys, values));
    return py::hasattr(type, "__dataclass_fields__") ? type(**entries) : type(entries);
  }
  if (py::hasattr(type, "__dataclass_fields__")) {
    py::object made = type.attr("__new__")(type);
    for (size_t i = 0; i < keys.size(); ++i) {  // as object.__setattr__: a frozen one has no other
      if (PyObject_GenericSetAttr(made.ptr(), py::object(keys[i]).ptr(),
                                  py::object(values[i]).ptr()) != 0) {
        throw py::error_already_set();
      }
    }
    return made;
  }
  return py::hasattr(type, "_make") ? type.attr("_make")(values) : type(values);
}

py::object read_record(FormReader& reader, const py::handle& placeholder) {
  const auto module = reader.text();
  const auto type = type_of(module, reader.text());
  py::list keys;
  py::list values;
  for (auto left = reader.integer(); left > 0; --left) {
    keys.append(read_form(reader, placeholder));
    values.append(read_form(reader, placeholder));
  }
  return make_record(type, keys, values);
}

py::list read_entries(FormReader& reader, const py::handle& placeholder) {
  py::list entries;
  for (auto left = reader.integer(); left > 0; --left) {
    entries.append(read_form(reader, placeholder));
  }
  return entries;
}

py::dict read_dict(FormReader& reader, const py::handle& placeholder) {
  reader.text();
  reader.text();
  py::dict dict;
  for (auto left = reader.integer(); left > 0; --left) {
    const auto key = read_form(reader, placeholder);
    dict[key] = read_form(reader, placeholder);
  }
  return dict;
}
}  // namespace

void write_form(const py::handle& object, const py::handle& placeholder, FormWriter& writer) {
  if (object.is(placeholder)) {
    writer.put(Tag::tensor);
    return;
  }
  if (write_leaf(object, writer)) {
    return;
  }
  auto kind = part_kind(object);
  kind = kind == Kind::packed ? Kind::tuple : kind;
  TORCH_CHECK_TYPE(
      has_entries(kind),
      "messages between processes hold tensors, None, numbers, texts, bytes, dtypes, devices, and "
      "tuples, lists, mappings and dataclasses of them (found: ",
      type_name(object), "); return those");
  const WalkDepth depth;
  bool has_keys = true;
  if (PyTuple_CheckExact(object.ptr())) {
    writer.put(Tag::tuple);
    has_keys = false;
  } else if (PyList_CheckExact(object.ptr())) {
    writer.put(Tag::list);
    writer.put(std::string_view("Any"));
    has_keys = false;
  } else if (PyDict_CheckExact(object.ptr())) {
    writer.put(Tag::dict);
    writer.put(std::string_view("Any"));
    writer.put(std::string_view("Any"));
  } else {
    write_record_name(object, writer);
  }
  const auto entries = entries_of(object, kind);
  writer.put(static_cast<int64_t>(entries.size()));
  for (const auto& entry : entries) {
    if (has_keys) {
      write_form(entry.key, placeholder, writer);
    }
    write_form(entry.value, placeholder, writer);
  }
}

py::object read_form(FormReader& reader, const py::handle& placeholder) {
  const WalkDepth depth;
  switch (const auto tag = reader.tag()) {
    case Tag::tensor:
      return py::reinterpret_borrow<py::object>(placeholder);
    case Tag::none:
      return py::none();
    case Tag::yes:
    case Tag::no:
      return py::bool_(tag == Tag::yes);
    case Tag::integer:
      return py::int_(reader.integer());
    case Tag::number:
      return py::module_::import("builtins").attr("int")(reader.text());
    case Tag::real:
      return py::float_(reader.real());
    case Tag::complex: {
      const double real = reader.real();
      return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(real, reader.real()));
    }
    case Tag::text:
      return py::str(reader.text());
    case Tag::bytes:
      return py::bytes(reader.text());
    case Tag::dtype:
      return py::module_::import("torch").attr(reader.text().c_str());
    case Tag::device:
      return py::module_::import("torch").attr("device")(reader.text());
    case Tag::tuple:
      return py::tuple(read_entries(reader, placeholder));
    case Tag::list:
      reader.text();
      return read_entries(reader, placeholder);
    case Tag::dict:
      return read_dict(reader, placeholder);
    case Tag::record:
      return read_record(reader, placeholder);
  }
  TORCH_CHECK_VALUE(false,
                    "a structure from another process cannot be read (tag unknown); run the "
                    "same version of brimful on all ranks");
}

}  // namespace brimful
