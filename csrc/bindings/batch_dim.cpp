#include "bindings/batch_dim.h"

#include <algorithm>

namespace brimful {
namespace {
std::string shown(const py::handle& object) {
  return py::repr(object).cast<std::string>();
}

/// A namedtuple's field by its name or index.
py::object in_dict(const py::dict& batch_dim, const py::handle& names, const Entry& entry,
                   size_t index) {
  if (batch_dim.contains(entry.key)) {
    return batch_dim[entry.key];
  }
  if (!names.is_none()) {
    const py::object name = py::reinterpret_borrow<py::object>(names)[py::int_(index)];
    if (batch_dim.contains(name)) {
      return batch_dim[name];
    }
  }
  return py::int_(0);
}

bool names_entry(const py::handle& key, const py::handle& names,
                 const std::vector<Entry>& entries) {
  return (!names.is_none() && py::reinterpret_borrow<py::object>(names).contains(key)) ||
         std::any_of(entries.begin(), entries.end(),
                     [&](const Entry& entry) { return entry.key.equal(key); });
}

std::string keys_of(const py::handle& names, const std::vector<Entry>& entries) {
  std::string text;
  for (size_t i = 0; i < entries.size(); ++i) {
    const py::object key =
        names.is_none() ? entries[i].key : py::reinterpret_borrow<py::object>(names)[py::int_(i)];
    text += (i == 0 ? "" : ", ") + shown(key);
  }
  return text;
}
}  // namespace

py::object checked_batch_dim(const py::handle& batch_dim, const std::string& path) {
  const WalkDepth depth;
  if (batch_dim.is_none() || (PyLong_Check(batch_dim.ptr()) && !PyBool_Check(batch_dim.ptr()))) {
    return py::reinterpret_borrow<py::object>(batch_dim);
  }
  const auto kind = part_kind(batch_dim);
  TORCH_CHECK_TYPE(kind == Kind::mapping || kind == Kind::list || kind == Kind::tuple,
                   "batch_dim must be an int, None, or a dict or sequence of them (", path, ": ",
                   shown(batch_dim), ")");
  py::dict by_key;
  py::list in_order;
  for (const auto& entry : entries_of(batch_dim, kind)) {
    const auto value = checked_batch_dim(entry.value, path + path_of(kind, entry));
    in_order.append(value);
    by_key[entry.key] = value;
  }
  return kind == Kind::mapping ? py::object(by_key) : py::object(py::tuple(in_order));
}

std::vector<py::object> batch_dims_of(const py::object& batch_dim, const py::handle& object,
                                      Kind kind, const std::vector<Entry>& entries,
                                      const std::string& path) {
  if (!mirrors(batch_dim)) {
    return std::vector<py::object>(entries.size(), batch_dim);
  }
  std::vector<py::object> dims;
  if (PyTuple_Check(batch_dim.ptr())) {
    TORCH_CHECK_VALUE(kind == Kind::list || kind == Kind::tuple,
                      "batch_dim is a sequence where the batch is not (", path, ": ",
                      type_name(object), "); give it by key");
    const auto sequence = batch_dim.cast<py::tuple>();
    TORCH_CHECK_VALUE(sequence.size() == entries.size(),
                      "batch_dim and the batch differ in length (batch_dim: ", sequence.size(),
                      ", ", path, ": ", entries.size(), "); give an int or None for each entry");
    for (const auto& dim : sequence) {
      dims.push_back(py::reinterpret_borrow<py::object>(dim));
    }
    return dims;
  }
  const auto by_key = batch_dim.cast<py::dict>();
  const py::object names =
      kind == Kind::tuple ? py::getattr(object, "_fields", py::none()) : py::object(py::none());
  for (const auto& [key, value] : by_key) {
    TORCH_CHECK_VALUE(names_entry(key, names, entries),
                      "batch_dim names an entry that the batch lacks (key: ", shown(key), ", ",
                      path, " has: ", keys_of(names, entries),
                      "); leave it out, or correct the batch");
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    dims.push_back(in_dict(by_key, names, entries[i], i));
  }
  return dims;
}

}  // namespace brimful
