#include "bindings/batch.h"

#include <brimful/sizer/split.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "bindings/batch_dim.h"
#include "bindings/ragged.h"

namespace brimful {
namespace {

struct Found {
  int64_t rows = 0;
  std::string path;
};

/// The rows of a leaf along `dim`, if it has any.
std::optional<int64_t> rows_of_leaf(const py::handle& leaf, Kind kind, int64_t dim,
                                    const std::string& path) {
  if (kind == Kind::packed) {
    return packed_rows(leaf);
  }
  if (kind == Kind::whole) {
    return std::nullopt;
  }
  const auto& tensor = THPVariable_Unpack(leaf.ptr());
  const auto dims = tensor.dim();
  if (dims == 0) {
    return std::nullopt;
  }
  TORCH_CHECK_VALUE(dim >= -dims && dim < dims,
                    "a tensor of the batch lacks the dimension of its rows (", path, ": ",
                    py::str(leaf.attr("shape")).cast<std::string>(), ", batch_dim: ", dim,
                    "); give each tensor its own in batch_dim");
  TORCH_CHECK_VALUE(kind != Kind::jagged || c10::maybe_wrap_dim(dim, dims) == 0,
                    "a jagged tensor has its rows in dimension 0 (", path, ", batch_dim: ", dim,
                    "); give it 0 in batch_dim");
  return kind == Kind::jagged ? leaf.attr("size")(0).cast<int64_t>() : tensor.size(dim);
}

void find_rows(const py::handle& object, const py::object& batch_dim, const std::string& path,
               std::optional<Found>& found) {
  if (batch_dim.is_none() || object.is_none()) {
    return;
  }
  const auto kind = part_kind(object);
  if (has_entries(kind)) {
    const WalkDepth depth;
    const auto entries = entries_of(object, kind);
    const auto dims = batch_dims_of(batch_dim, object, kind, entries, path);
    for (size_t i = 0; i < entries.size(); ++i) {
      find_rows(entries[i].value, dims[i], path + path_of(kind, entries[i]), found);
    }
    return;
  }
  TORCH_CHECK_VALUE(!mirrors(batch_dim), "batch_dim has entries where the batch has none (", path,
                    ": ", type_name(object), "); give an int or None there");
  const auto rows = rows_of_leaf(object, kind, batch_dim.cast<int64_t>(), path);
  if (!rows) {
    return;
  }
  if (!found) {
    found = {*rows, path};
  }
  TORCH_CHECK_VALUE(found->rows == *rows, "tensors of the batch disagree in size (", found->path,
                    ": ", found->rows, ", ", path, ": ", *rows,
                    "); give all the same first dimension, or say in batch_dim where rows are");
}

bool has_tensor(const py::handle& object) {
  bool found = false;
  for_each_tensor(object, [&](const at::Tensor&) { found = true; });
  return found;
}

/// One piece of a batch.
class Cut {
 public:
  Cut(int64_t rows, int64_t begin, int64_t end) : range_{rows, begin, end} {}

  py::object operator()(const py::handle& object, const py::object& batch_dim) {
    if (batch_dim.is_none() || object.is_none()) {
      return py::reinterpret_borrow<py::object>(object);
    }
    const auto kind = part_kind(object);
    switch (kind) {
      case Kind::whole:
        return py::reinterpret_borrow<py::object>(object);
      case Kind::tensor:
        return of_tensor(object, batch_dim.cast<int64_t>());
      case Kind::jagged:
        return jagged_.slice(object, range_.begin, range_.end);
      case Kind::packed:
        return slice_packed(object, range_.begin, range_.end);
      default:
        return of_structure(object, kind, batch_dim);
    }
  }

 private:
  py::object of_tensor(const py::handle& object, int64_t dim) const {
    const auto& tensor = THPVariable_Unpack(object.ptr());
    if (THPVariable_CheckExact(object.ptr()) || tensor.dim() == 0 ||
        tensor.layout() != at::kStrided) {
      return py::cast(detail::slice_tensor(tensor, dim, range_));
    }
    return object.attr("narrow")(dim, range_.begin, range_.end - range_.begin);  // keeps its class
  }

  py::object of_structure(const py::handle& object, Kind kind, const py::object& batch_dim) {
    const WalkDepth depth;
    const auto before = entries_of(object, kind);
    if (kind == Kind::list && is_column(object, before.size())) {
      return column(object);
    }
    const auto dims = batch_dims_of(batch_dim, object, kind, before, "batch");
    auto entries = before;
    for (size_t i = 0; i < entries.size(); ++i) {
      entries[i].value = (*this)(before[i].value, dims[i]);
    }
    const py::object piece = rebuild(object, kind, before, entries);
    // A BatchEncoding of transformers holds what its tokenizer said of each row beside its entries.
    const py::object of_rows = py::getattr(piece, "_encodings", py::none());
    if (kind == Kind::mapping && PyList_Check(of_rows.ptr()) &&
        is_column(of_rows, py::len(of_rows))) {
      py::setattr(piece, "_encodings", column(of_rows));
    }
    return piece;
  }

  /// A list with an entry for each row.
  bool is_column(const py::handle& list, size_t length) const {
    return static_cast<int64_t>(length) == range_.rows && !has_tensor(list);
  }
  py::object column(const py::handle& list) const {
    return py::reinterpret_borrow<py::object>(list)[py::slice(range_.begin, range_.end, 1)];
  }

  detail::Range range_;
  JaggedSlices jagged_;
};
}  // namespace

Splitter::Splitter(const py::object& batch_dim, std::optional<py::function> size_fn,
                   std::optional<py::function> split_fn)
    : batch_dim_(checked_batch_dim(batch_dim)),
      size_fn_(std::move(size_fn)),
      split_fn_(std::move(split_fn)) {
  TORCH_CHECK_VALUE(size_fn_.has_value() == split_fn_.has_value(),
                    "size_fn and split_fn go together (missing: ",
                    size_fn_ ? "split_fn" : "size_fn", "); pass both");
  TORCH_CHECK_VALUE(!size_fn_ || batch_dim_.equal(py::int_(0)),
                    "batch_dim says nothing to size_fn and split_fn (batch_dim: ",
                    py::repr(batch_dim_).cast<std::string>(), "); leave it out");
}

int64_t Splitter::rows_of(const py::handle& batch) const {
  if (size_fn_) {
    const py::object size = (*size_fn_)(batch);
    TORCH_CHECK_TYPE(PyIndex_Check(size.ptr()),
                     "size_fn returned no number of rows (type: ", type_name(size),
                     "); return an int");
    const auto rows = py::int_(size).cast<int64_t>();
    TORCH_CHECK_VALUE(rows >= 0, "size_fn returned a negative number of rows (rows: ", rows, ")");
    return rows;
  }
  const auto rows = rows_if_any(batch);
  TORCH_CHECK_TYPE(rows, "the batch holds no tensor that could be split (type: ", type_name(batch),
                   "); pass a tensor, a structure of tensors, or size_fn and split_fn");
  return *rows;
}

std::optional<int64_t> Splitter::rows_if_any(const py::handle& batch) const {
  std::optional<Found> found;
  find_rows(batch, batch_dim_, "batch", found);
  return found ? std::optional<int64_t>(found->rows) : std::nullopt;
}

py::object Splitter::slice(const py::handle& batch, int64_t rows, int64_t begin,
                           int64_t end) const {
  return split_fn_ ? (*split_fn_)(batch, begin, end) : Cut(rows, begin, end)(batch, batch_dim_);
}

std::vector<NamedTensor> Splitter::tensors(const py::handle& batch, int64_t rows, int64_t begin,
                                           int64_t end) const {
  return begin == 0 && end == rows ? named_tensors(batch, "batch")
                                   : named_tensors(slice(batch, rows, begin, end), "batch");
}

void bind_batch(py::module_& m) {
  load_structure_types();
  py::class_<KeptBatch>(m, "_KeptBatch")
      .def(py::init([](const py::object& batch) {
             auto kept = std::make_unique<KeptBatch>();
             kept->begin(named_tensors(batch, "batch"), KeptBatch::Copies::all);
             return kept;
           }),
           py::arg("batch"))
      .def("restore", &KeptBatch::restore, py::call_guard<py::gil_scoped_release>());
  py::class_<Splitter, std::shared_ptr<Splitter>>(m, "Splitter")
      .def(py::init<const py::object&, std::optional<py::function>, std::optional<py::function>>(),
           py::kw_only(), py::arg("batch_dim") = 0, py::arg("size_fn") = py::none(),
           py::arg("split_fn") = py::none())
      .def("rows_of", &Splitter::rows_of, py::arg("batch"))
      .def("slice", &Splitter::slice, py::arg("batch"), py::arg("rows"), py::arg("begin"),
           py::arg("end"));
}

}  // namespace brimful
