#include "bindings/batch.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>

namespace brimful {
namespace {
bool is_tensor(const py::handle& object) {
  return THPVariable_Check(object.ptr());
}

bool is_container(const py::handle& object) {
  return py::isinstance<py::tuple>(object) || py::isinstance<py::list>(object) ||
         py::isinstance<py::dict>(object);
}

/// Visits the entries of a tuple, list or dict with the text that indexes them.
template <typename Visit>
void for_each_entry(const py::handle& container, const Visit& visit) {
  if (py::isinstance<py::dict>(container)) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(container)) {
      visit(value, "[" + static_cast<std::string>(py::repr(key)) + "]");
    }
    return;
  }
  size_t i = 0;
  for (const auto& value : py::reinterpret_borrow<py::sequence>(container)) {
    visit(value, "[" + std::to_string(i++) + "]");
  }
}

struct Found {
  int64_t rows = 0;
  std::string path;
};

void find_rows(const py::handle& object, const std::string& path, std::optional<Found>& found) {
  if (is_container(object)) {
    for_each_entry(object, [&](const py::handle& value, const std::string& index) {
      find_rows(value, path + index, found);
    });
    return;
  }
  if (!is_tensor(object)) {
    return;
  }
  const auto& tensor = THPVariable_Unpack(object.ptr());
  if (tensor.dim() == 0) {
    return;
  }
  if (!found) {
    found = {tensor.size(0), path};
  }
  TORCH_CHECK_VALUE(found->rows == tensor.size(0), "tensors of the batch disagree in size (",
                    found->path, ": ", found->rows, ", ", path, ": ", tensor.size(0),
                    "); give all the same first dimension");
}

bool has_tensor(const py::handle& object) {
  bool found = false;
  for_each_tensor(object, [&](const at::Tensor&) { found = true; });
  return found;
}

py::object rebuild_tuple(const py::handle& original, const py::list& items) {
  if (py::hasattr(original, "_make")) {  // namedtuple
    return original.attr("_make")(items);
  }
  return py::tuple(items);
}
}  // namespace

void for_each_tensor(const py::handle& object,
                     const std::function<void(const at::Tensor&)>& visit) {
  if (is_tensor(object)) {
    visit(THPVariable_Unpack(object.ptr()));
  } else if (is_container(object)) {
    for_each_entry(object, [&](const py::handle& value, const std::string&) {
      for_each_tensor(value, visit);
    });
  } else if (py::hasattr(object, "__dataclass_fields__")) {
    for (const auto& field : object.attr("__dataclass_fields__")) {
      for_each_tensor(py::getattr(object, field, py::none()), visit);
    }
  }
}

int64_t rows_of(const py::handle& batch) {
  std::optional<Found> found;
  find_rows(batch, "batch", found);
  TORCH_CHECK_TYPE(found, "the batch holds no tensor that could be split (type: ",
                   py::str(py::type::handle_of(batch)).cast<std::string>(),
                   "); pass a tensor, or a tuple, list or dict of tensors");
  return found->rows;
}

py::object slice_rows(const py::handle& batch, int64_t rows, int64_t begin, int64_t end) {
  if (is_tensor(batch)) {
    const auto& tensor = THPVariable_Unpack(batch.ptr());
    return tensor.dim() == 0 ? py::reinterpret_borrow<py::object>(batch)
                             : py::cast(tensor.narrow(0, begin, end - begin));
  }
  if (!is_container(batch)) {
    return py::reinterpret_borrow<py::object>(batch);
  }
  if (py::isinstance<py::dict>(batch)) {
    py::object copy = batch.attr("copy")();
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(batch)) {
      copy[key] = slice_rows(value, rows, begin, end);
    }
    return copy;
  }
  const auto sequence = py::reinterpret_borrow<py::sequence>(batch);
  if (py::isinstance<py::list>(batch) && static_cast<int64_t>(sequence.size()) == rows &&
      !has_tensor(batch)) {
    return batch[py::slice(begin, end, 1)];
  }
  py::list items;
  for (const auto& value : sequence) {
    items.append(slice_rows(value, rows, begin, end));
  }
  return py::isinstance<py::list>(batch) ? py::object(items) : rebuild_tuple(batch, items);
}

void bind_batch(py::module_& m) {
  m.def("_rows_of", [](const py::object& batch) { return rows_of(batch); });
  m.def("_slice_rows", [](const py::object& batch, int64_t begin, int64_t end) {
    return slice_rows(batch, rows_of(batch), begin, end);
  });
}

}  // namespace brimful
