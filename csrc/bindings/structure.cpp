#include "bindings/structure.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <iterator>

namespace brimful {
namespace {
// Owned by the module; plain pointers, because they are used until the interpreter ends.
struct StructureTypes {
  PyObject* mapping = nullptr;
  PyObject* user_dict = nullptr;
  PyObject* packed_sequence = nullptr;
  PyObject* fields = nullptr;
  PyObject* copy = nullptr;
};
StructureTypes structure_types;

constexpr int kDeepest = 500;
thread_local int walk_depth = 0;

PyObject* look_up(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

bool is_dict_like(const py::handle& object) {
  return PyDict_Check(object.ptr()) ||
         py::isinstance(object, py::handle(structure_types.user_dict));
}

bool same_values(const std::vector<Entry>& before, const std::vector<Entry>& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].value.is(before[i].value)) {
      return false;
    }
  }
  return true;
}

py::list values_of(const std::vector<Entry>& entries) {
  py::list values;
  for (const auto& entry : entries) {
    values.append(entry.value);
  }
  return values;
}

py::object rebuild_mapping(const py::handle& original, const std::vector<Entry>& entries) {
  // A copy of another mapping may share its store with the original.
  py::object made =
      is_dict_like(original) ? py::handle(structure_types.copy)(original) : py::dict();
  for (const auto& entry : entries) {
    made[entry.key] = entry.value;
  }
  return is_dict_like(original) ? made : py::type::handle_of(original)(made);
}

py::object rebuild_dataclass(const py::handle& original, const std::vector<Entry>& entries) {
  py::object made = py::handle(structure_types.copy)(original);
  for (const auto& entry : entries) {  // as object.__setattr__: a frozen one has no other
    if (PyObject_GenericSetAttr(made.ptr(), entry.key.ptr(), entry.value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return made;
}

py::object rebuild_sequence(const py::handle& original, Kind kind, const py::list& values) {
  if (PyList_CheckExact(original.ptr())) {
    return values;
  }
  if (PyTuple_CheckExact(original.ptr())) {
    return py::tuple(values);
  }
  if (kind == Kind::tuple && py::hasattr(original, "_make")) {  // namedtuple
    return original.attr("_make")(values);
  }
  return py::type::handle_of(original)(values);
}
}  // namespace

void load_structure_types() {
  structure_types.mapping = look_up("collections.abc", "Mapping");
  structure_types.user_dict = look_up("collections", "UserDict");
  structure_types.packed_sequence = look_up("torch.nn.utils.rnn", "PackedSequence");
  structure_types.fields = look_up("dataclasses", "fields");
  structure_types.copy = look_up("copy", "copy");
}

std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object)).cast<std::string>();
}

WalkDepth::WalkDepth() {
  TORCH_CHECK_VALUE(walk_depth < kDeepest,
                    "a structure of tensors holds itself, or is nested too "
                    "deeply (levels: more than ",
                    kDeepest, "); flatten it");
  ++walk_depth;
}

WalkDepth::~WalkDepth() {
  --walk_depth;
}

Kind part_kind(const py::handle& object) {
  PyObject* p = object.ptr();
  if (THPVariable_Check(p)) {
    return THPVariable_Unpack(p).layout() == at::kJagged ? Kind::jagged : Kind::tensor;
  }
  if (PyTuple_Check(p)) {
    return py::isinstance(object, py::handle(structure_types.packed_sequence)) ? Kind::packed
                                                                               : Kind::tuple;
  }
  if (PyDict_Check(p)) {
    return Kind::mapping;
  }
  if (PyList_Check(p)) {
    return Kind::list;
  }
  if (p == Py_None || PyUnicode_Check(p) || PyLong_Check(p) || PyFloat_Check(p) ||
      PyType_Check(p)) {
    return Kind::whole;
  }
  if (py::hasattr(object, "__dataclass_fields__")) {
    return Kind::dataclass;
  }
  return py::isinstance(object, py::handle(structure_types.mapping)) ? Kind::mapping : Kind::whole;
}

std::vector<Entry> entries_of(const py::handle& object, Kind kind) {
  std::vector<Entry> entries;
  if (kind == Kind::mapping) {
    for (const auto& item : object.attr("items")()) {
      const auto pair = py::reinterpret_borrow<py::object>(item);
      entries.push_back({pair[py::int_(0)], pair[py::int_(1)]});
    }
  } else if (kind == Kind::dataclass) {
    for (const auto& field : py::handle(structure_types.fields)(object)) {
      const py::object name = field.attr("name");
      if (py::hasattr(object, name)) {
        entries.push_back({name, object.attr(name)});
      }
    }
  } else if (has_entries(kind)) {
    for (const auto& value : object) {
      entries.push_back({py::int_(entries.size()), py::reinterpret_borrow<py::object>(value)});
    }
  }
  return entries;
}

std::string path_of(Kind kind, const Entry& entry) {
  return kind == Kind::dataclass ? "." + entry.key.cast<std::string>()
                                 : "[" + py::repr(entry.key).cast<std::string>() + "]";
}

py::object rebuild(const py::handle& original, Kind kind, const std::vector<Entry>& before,
                   const std::vector<Entry>& entries) {
  const bool mutable_container = kind == Kind::list || is_dict_like(original);
  if (!mutable_container && same_values(before, entries)) {
    return py::reinterpret_borrow<py::object>(original);
  }
  try {
    switch (kind) {
      case Kind::mapping:
        return rebuild_mapping(original, entries);
      case Kind::dataclass:
        return rebuild_dataclass(original, entries);
      default:
        return rebuild_sequence(original, kind, values_of(entries));
    }
  } catch (py::error_already_set& error) {
    const auto text =
        "a part of the batch cannot be made again from its pieces (type: " + type_name(original) +
        "); pass size_fn and split_fn";
    py::raise_from(error, PyExc_TypeError, text.c_str());
    throw py::error_already_set();
  }
}

void for_each_tensor(const py::handle& object,
                     const std::function<void(const at::Tensor&)>& visit) {
  if (THPVariable_Check(object.ptr())) {
    visit(THPVariable_Unpack(object.ptr()));
    return;
  }
  const auto kind = part_kind(object);
  const WalkDepth depth;
  for (const auto& entry : entries_of(object, kind == Kind::packed ? Kind::tuple : kind)) {
    for_each_tensor(entry.value, visit);
  }
}

std::vector<NamedTensor> named_tensors(const py::handle& object, const std::string& path) {
  const auto kind = part_kind(object);
  if (kind == Kind::tensor || kind == Kind::jagged) {
    const auto tensor =
        kind == Kind::jagged ? object.attr("values")() : py::reinterpret_borrow<py::object>(object);
    return {{path, THPVariable_Unpack(tensor.ptr())}};
  }
  std::vector<NamedTensor> tensors;
  const WalkDepth depth;
  const auto as = kind == Kind::packed ? Kind::tuple : kind;
  for (const auto& entry : entries_of(object, as)) {
    auto inner = named_tensors(entry.value, path + path_of(as, entry));
    std::move(inner.begin(), inner.end(), std::back_inserter(tensors));
  }
  return tensors;
}

bool holds(const py::handle& object, Kind kind) {
  const auto own = part_kind(object);
  if (own == kind) {
    return true;
  }
  const WalkDepth depth;
  const auto entries = entries_of(object, own);
  return std::any_of(entries.begin(), entries.end(),
                     [&](const Entry& entry) { return holds(entry.value, kind); });
}

}  // namespace brimful
