#include "bindings/own_indexing.h"

#include <ATen/ATen.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>

#include "bindings/callbacks.h"
#include "bindings/split_types.h"

namespace brimful {
namespace {
constexpr const char* kRemedy = "); say how it is cut with register_split";

py::object index_of(int64_t dim, const detail::Range& range) {
  auto rows = py::slice(range.begin, range.end, 1);
  if (dim == 0) {
    return rows;
  }
  py::list index;
  for (int64_t i = 0; i < dim; ++i) {
    index.append(py::slice(std::nullopt, std::nullopt, std::nullopt));
  }
  index.append(rows);
  return py::tuple(index);
}

py::dict attributes_of(const py::handle& object) {
  const py::object found = py::getattr(object, "__dict__", py::none());
  return PyDict_Check(found.ptr()) ? found.cast<py::dict>() : py::dict();
}

bool same_class(const py::handle& a, const py::handle& b) {
  return py::type::handle_of(a).is(py::type::handle_of(b));
}

at::Tensor narrowed(const at::Tensor& tensor, int64_t dim, const detail::Range& range) {
  return tensor.narrow(dim, range.begin, range.end - range.begin);
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.is_alias_of(b) &&
         a.storage_offset() == b.storage_offset() && a.strides() == b.strides();
}

/// Whether a class cuts tensors as it should; values that are no view are compared once a class, since that waits.
bool cuts_rows(const py::handle& type, const at::Tensor& piece, const at::Tensor& expected) {
  // Leaked with the interpreter.
  static PyObject* const known = py::module_::import("weakref").attr("WeakSet")().release().ptr();
  if (piece.sizes() != expected.sizes() || piece.dtype() != expected.dtype()) {
    return false;
  }
  const auto checked = py::reinterpret_borrow<py::object>(known);
  const bool wraps = piece.key_set().has(c10::DispatchKey::Python);
  if (wraps || same_memory(piece, expected) || checked.contains(type)) {
    return true;
  }
  if (!at::equal(piece, expected)) {
    return false;
  }
  checked.attr("add")(type);
  return true;
}

py::object own_rows_of(const py::handle& tensor, const py::object& index) {
  try {
    return py::reinterpret_borrow<py::object>(tensor)[index];
  } catch (py::error_already_set& error) {
    if (ran_out_of_memory(error.value()) || !error.matches(PyExc_Exception)) {
      throw;
    }
    const auto text =
        "a tensor's class cannot cut it by its own indexing (type: " + type_name(tensor) + kRemedy;
    py::raise_from(error, PyExc_TypeError, text.c_str());
    throw py::error_already_set();
  }
}

void require_attributes(const py::handle& original, const py::handle& piece) {
  const auto kept = attributes_of(piece);
  for (const auto& [name, value] : attributes_of(original)) {
    TORCH_CHECK_TYPE(
        kept.contains(name),
        "a piece of the batch would lose what its class keeps beside its values (type: ",
        type_name(original), ", attribute: ", py::str(name).cast<std::string>(), kRemedy);
  }
}

/// A dict in which a mapping keeps its entries, or a list of such.
bool is_store(const py::handle& value, const std::vector<Entry>& entries) {
  const bool is_entry = std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
    return entry.value.ptr() == value.ptr();
  });
  const auto kind = part_kind(value);
  if (is_entry || (kind != Kind::mapping && kind != Kind::list)) {
    return is_entry;
  }
  const WalkDepth depth;
  const auto inner = entries_of(value, kind);
  return !inner.empty() && std::all_of(inner.begin(), inner.end(), [&](const Entry& entry) {
    return is_store(entry.value, entries);
  });
}

bool has_an_entry_for_each(const py::handle& value, int64_t rows) {
  if (THPVariable_Check(value.ptr())) {
    const auto& tensor = THPVariable_Unpack(value.ptr());
    return tensor.dim() > 0 && tensor.size(0) == rows;
  }
  if (PyUnicode_Check(value.ptr()) || PyBytes_Check(value.ptr())) {
    return false;
  }
  if (is_array(value)) {
    return value.attr("ndim").cast<int64_t>() > 0 && static_cast<int64_t>(py::len(value)) == rows;
  }
  const auto is_number = [](const auto& entry) { return PyNumber_Check(entry.ptr()) != 0; };
  const bool is_size =
      PyTuple_Check(value.ptr()) && std::all_of(value.begin(), value.end(), is_number);
  return (PyList_Check(value.ptr()) || (PyTuple_Check(value.ptr()) && !is_size)) &&
         static_cast<int64_t>(py::len(value)) == rows;
}

/// Something that has rows, at any depth.
bool holds_rows_at_all(const py::handle& value, int64_t rows) {
  if (has_an_entry_for_each(value, rows)) {
    return true;
  }
  const auto kind = part_kind(value);
  if (!has_entries(kind)) {
    return false;
  }
  const WalkDepth depth;
  const auto entries = entries_of(value, kind);
  return std::any_of(entries.begin(), entries.end(),
                     [&](const Entry& entry) { return holds_rows_at_all(entry.value, rows); });
}

bool same_value(const py::handle& a, const py::handle& b) {
  if (a.is(b)) {
    return true;
  }
  const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (equal < 0) {
    PyErr_Clear();
  }
  return equal > 0;
}

bool has_no_state(const py::handle& object) {
  PyObject* p = object.ptr();
  return PyDict_CheckExact(p) || PyList_CheckExact(p) || PyTuple_CheckExact(p);
}
}  // namespace

py::object slice_subclass(const py::handle& tensor, int64_t dim, const detail::Range& range) {
  const auto& whole = THPVariable_Unpack(tensor.ptr());
  TORCH_CHECK_TYPE(whole.layout() == at::kStrided,
                   "a sparse tensor would lose its class in a piece (type: ", type_name(tensor),
                   kRemedy);
  const auto type = py::type::handle_of(tensor);
  const auto row_dim = c10::maybe_wrap_dim(dim, whole.dim());
  py::object piece = own_rows_of(tensor, index_of(row_dim, range));
  TORCH_CHECK_TYPE(THPVariable_Check(piece.ptr()),
                   "a tensor's own indexing gives no tensor (type: ", type_name(tensor),
                   ", piece: ", type_name(piece), kRemedy);
  if (!same_class(piece, tensor) && attributes_of(tensor).empty()) {  // then it has nothing to lose
    piece = py::module_::import("torch").attr("Tensor").attr("as_subclass")(piece, type);
  }
  TORCH_CHECK_TYPE(same_class(piece, tensor),
                   "a piece of the batch would lose its class (type: ", type_name(tensor),
                   ", piece: ", type_name(piece), kRemedy);
  require_attributes(tensor, piece);
  const auto& cut = THPVariable_Unpack(piece.ptr());
  const bool wraps = whole.key_set().has(c10::DispatchKey::Python);
  TORCH_CHECK_TYPE(cut.dim() == whole.dim() && cut.size(row_dim) == range.end - range.begin &&
                       (wraps || cuts_rows(type, cut, narrowed(whole, row_dim, range))),
                   "a tensor's own indexing gives other rows than were asked for (type: ",
                   type_name(tensor), ", rows: ", range.begin, " to ", range.end, kRemedy);
  return piece;
}

std::optional<py::object> slice_structure(const py::handle& object, Kind kind,
                                          const std::vector<Entry>& cut, int64_t dim,
                                          const detail::Range& range) {
  if (PyDict_Check(object.ptr()) || (kind != Kind::mapping && kind != Kind::dataclass) || dim < 0 ||
      !py::hasattr(py::type::handle_of(object), "__getitem__")) {
    return std::nullopt;
  }
  py::object piece;
  try {
    piece = py::reinterpret_borrow<py::object>(object)[index_of(dim, range)];
  } catch (const py::error_already_set& error) {
    if (ran_out_of_memory(error.value()) || !error.matches(PyExc_Exception)) {
      throw;
    }
    return std::nullopt;  // it has keys alone
  }
  if (!same_class(piece, object)) {
    return std::nullopt;
  }
  const auto entries = entries_of(piece, kind);
  const auto type = py::type::handle_of(object);
  const bool same = std::equal(
      entries.begin(), entries.end(), cut.begin(), cut.end(), [&](const Entry& a, const Entry& b) {
        const bool tensors = THPVariable_Check(a.value.ptr()) && THPVariable_Check(b.value.ptr());
        return a.key.equal(b.key) && (tensors ? cuts_rows(type, THPVariable_Unpack(a.value.ptr()),
                                                          THPVariable_Unpack(b.value.ptr()))
                                              : same_class(a.value, b.value));
      });
  return same ? std::optional(piece) : std::nullopt;
}

void require_state_kept(const py::handle& original, const py::handle& piece,
                        const std::vector<Entry>& entries, int64_t rows) {
  if (has_no_state(original) || piece.is(original)) {
    return;
  }
  TORCH_CHECK_TYPE(same_class(piece, original),
                   "a piece of the batch would lose its class (type: ", type_name(original),
                   ", piece: ", type_name(piece), kRemedy);
  const auto kept = attributes_of(piece);
  for (const auto& [name, value] : attributes_of(original)) {
    const auto is_entry = [&, key = name](const Entry& entry) { return entry.key.equal(key); };
    if (is_store(value, entries) || std::any_of(entries.begin(), entries.end(), is_entry)) {
      continue;
    }
    const bool has = kept.contains(name);
    const bool shared = has && py::object(kept[name]).ptr() == value.ptr();
    const bool lost =
        !has || !(same_value(kept[name], value) || has_an_entry_for_each(value, rows));
    TORCH_CHECK_TYPE(!lost && !(shared && holds_rows_at_all(value, rows)),
                     "a part of the batch keeps ", lost ? "state" : "something for each row",
                     " beside its entries, which its pieces would ",
                     lost ? "lose" : "all have whole", " (type: ", type_name(original),
                     ", attribute: ", py::str(name).cast<std::string>(), kRemedy);
  }
}

}  // namespace brimful
