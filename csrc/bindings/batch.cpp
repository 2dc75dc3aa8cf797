#include "bindings/batch.h"

#include <brimful/sizer/split.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>

#include "bindings/batch_dim.h"
#include "bindings/ragged.h"
#include "bindings/split_types.h"

namespace brimful {
namespace {

struct Found {
  int64_t rows = 0;
  std::string path;
};

/// How many there are along `dim`, of what has a dimension.
int64_t checked_dim(const py::handle& part, int64_t dims, int64_t dim, const std::string& path) {
  TORCH_CHECK_VALUE(dim >= -dims && dim < dims,
                    "a tensor of the batch lacks the dimension of its rows (", path, ": ",
                    py::str(part.attr("shape")).cast<std::string>(), ", batch_dim: ", dim,
                    "); give each tensor its own in batch_dim");
  return c10::maybe_wrap_dim(dim, dims);
}

/// The rows of a leaf along `dim`, if it has any.
std::optional<int64_t> rows_of_leaf(const py::handle& leaf, Kind kind, int64_t dim,
                                    const std::string& path) {
  if (kind == Kind::packed) {
    return packed_rows(leaf);
  }
  if (kind == Kind::whole) {
    if (is_array(leaf)) {
      const auto dims = leaf.attr("ndim").cast<int64_t>();
      return dims == 0
                 ? std::nullopt
                 : std::optional(leaf.attr("shape")[py::int_(checked_dim(leaf, dims, dim, path))]
                                     .cast<int64_t>());
    }
    TORCH_CHECK_TYPE(is_plain(leaf),
                     "this part of the batch is neither cut into rows nor said to be whole (", path,
                     ": ", type_name(leaf),
                     "); say how it is cut with register_split, or with None in batch_dim "
                     "(kwargs_dim for a keyword) that every piece gets it whole");
    return std::nullopt;
  }
  const auto& tensor = THPVariable_Unpack(leaf.ptr());
  if (tensor.dim() == 0) {
    return std::nullopt;
  }
  const auto row_dim = checked_dim(leaf, tensor.dim(), dim, path);
  TORCH_CHECK_VALUE(kind != Kind::jagged || row_dim == 0,
                    "a jagged tensor has its rows in dimension 0 (", path, ", batch_dim: ", dim,
                    "); give it 0 in batch_dim");
  return kind == Kind::jagged ? leaf.attr("size")(0).cast<int64_t>() : tensor.size(row_dim);
}

/// Whether a part has rows of its own, whatever it is in. Not so an array: a list may have one for each row.
bool holds_rows(const py::handle& object) {
  if (const auto own = own_split_of(object)) {
    return !own->rows_of.is_none();
  }
  const auto kind = part_kind(object);
  if (!has_entries(kind)) {
    return kind != Kind::whole;
  }
  const WalkDepth depth;
  const auto entries = entries_of(object, kind);
  return std::any_of(entries.begin(), entries.end(),
                     [](const Entry& entry) { return holds_rows(entry.value); });
}

bool is_array_of(const py::handle& object, int64_t rows) {
  return is_array(object) && object.attr("ndim").cast<int64_t>() > 0 &&
         object.attr("shape")[py::int_(0)].cast<int64_t>() == rows;
}

/// Whether a list has an entry for each row.
bool is_column(const py::handle& list, int64_t rows) {
  if (static_cast<int64_t>(py::len(list)) != rows || holds_rows(list)) {
    return false;
  }
  TORCH_CHECK_VALUE(
      rows < 2 || !std::all_of(list.begin(), list.end(),
                               [&](const auto& entry) { return is_array_of(entry, rows); }),
      "a list has as many arrays as there are rows, and each of them as many rows (rows: ", rows,
      "): it may be cut by its entries or by theirs; pass a tuple of arrays, or a list of tensors");
  return true;
}

/// Looks for the rows of a batch, which all its parts must have alike.
class RowFinder {
 public:
  explicit RowFinder(std::string name) : name_(std::move(name)) {}

  std::optional<Found> operator()(const py::handle& batch, const py::object& batch_dim) {
    visit(batch, batch_dim, name_);
    // Whether a list is cut by its entries depends on how many rows the rest has.
    for (size_t i = 0; i < lists_.size(); ++i) {
      const auto list = lists_[i];
      if (!found_ || !is_column(list.object, found_->rows)) {
        visit_entries(list.object, Kind::list, list.batch_dim, list.path);
      }
    }
    return found_;
  }

 private:
  struct List {
    py::object object;
    py::object batch_dim;
    std::string path;
  };

  void visit(const py::handle& object, const py::object& batch_dim, const std::string& path) {
    if (batch_dim.is_none() || object.is_none()) {
      return;
    }
    if (const auto own = own_split_of(object)) {
      return add(own_rows(*own, object), path);
    }
    const auto kind = part_kind(object);
    if (kind == Kind::list && !holds_rows(object)) {
      lists_.push_back({py::reinterpret_borrow<py::object>(object), batch_dim, path});
      return;
    }
    if (has_entries(kind)) {
      return visit_entries(object, kind, batch_dim, path);
    }
    TORCH_CHECK_VALUE(!mirrors(batch_dim), "batch_dim has entries where the batch has none (", path,
                      ": ", type_name(object), "); give an int or None there");
    add(rows_of_leaf(object, kind, batch_dim.cast<int64_t>(), path), path);
  }

  void visit_entries(const py::handle& object, Kind kind, const py::object& batch_dim,
                     const std::string& path) {
    const WalkDepth depth;
    const auto entries = entries_of(object, kind);
    const auto dims = batch_dims_of(batch_dim, object, kind, entries, path);
    for (size_t i = 0; i < entries.size(); ++i) {
      visit(entries[i].value, dims[i], path + path_of(kind, entries[i]));
    }
  }

  void add(std::optional<int64_t> rows, const std::string& path) {
    if (!rows) {
      return;
    }
    if (!found_) {
      found_ = {*rows, path};
    }
    TORCH_CHECK_VALUE(found_->rows == *rows, "tensors of the batch disagree in size (",
                      found_->path, ": ", found_->rows, ", ", path, ": ", *rows,
                      "); give all the same first dimension, or say in batch_dim where rows are");
  }

  std::string name_;
  std::optional<Found> found_;
  std::vector<List> lists_;
};

/// One piece of a batch.
class Cut {
 public:
  Cut(int64_t rows, int64_t begin, int64_t end) : range_{rows, begin, end} {}

  py::object operator()(const py::handle& object, const py::object& batch_dim) {
    if (batch_dim.is_none() || object.is_none()) {
      return py::reinterpret_borrow<py::object>(object);
    }
    if (const auto own = own_split_of(object)) {
      return own_slice(*own, object, range_.begin, range_.end);
    }
    const auto kind = part_kind(object);
    switch (kind) {
      case Kind::whole:
        return is_array(object) ? of_array(object, batch_dim.cast<int64_t>())
                                : py::reinterpret_borrow<py::object>(object);
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

  /// A view.
  py::object of_array(const py::handle& object, int64_t dim) const {
    const auto dims = object.attr("ndim").cast<int64_t>();
    if (dims == 0) {
      return py::reinterpret_borrow<py::object>(object);
    }
    py::list index;
    for (int64_t i = c10::maybe_wrap_dim(dim, dims); i > 0; --i) {
      index.append(py::slice(std::nullopt, std::nullopt, std::nullopt));
    }
    index.append(py::slice(range_.begin, range_.end, 1));
    return object[py::tuple(index)];
  }

  py::object of_structure(const py::handle& object, Kind kind, const py::object& batch_dim) {
    const WalkDepth depth;
    const auto before = entries_of(object, kind);
    if (kind == Kind::list && is_column(object, range_.rows)) {
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
    if (kind == Kind::mapping && PyList_Check(of_rows.ptr()) && is_column(of_rows, range_.rows)) {
      py::setattr(piece, "_encodings", column(of_rows));
    }
    return piece;
  }

  py::object column(const py::handle& list) const {
    return py::reinterpret_borrow<py::object>(list)[py::slice(range_.begin, range_.end, 1)];
  }

  detail::Range range_;
  JaggedSlices jagged_;
};
/// What has rows and is no tensor: arrays by shape and dtype; of other types nothing is known.
void add_others(const py::handle& part, RowKind& kind) {
  if (const auto own = own_split_of(part)) {
    kind.uneven = kind.uneven || !own->rows_of.is_none();
    return;
  }
  const auto sort = part_kind(part);
  if (sort == Kind::whole && is_array(part)) {
    const auto shape = part.attr("shape").cast<std::vector<int64_t>>();
    kind.form +=
        py::str(part.attr("dtype")).cast<std::string>() + std::to_string(shape.size()) + ';';
    kind.sizes.insert(kind.sizes.end(), shape.begin(), shape.end());
  } else if (has_entries(sort)) {
    const WalkDepth depth;
    for (const auto& entry : entries_of(part, sort)) {
      add_others(entry.value, kind);
    }
  }
}

}  // namespace

RowKind row_kind_of(const py::handle& row) {
  RowKind kind;
  for_each_tensor(row, [&](const at::Tensor& tensor) { kind.add(tensor, std::nullopt); });
  kind.uneven = kind.uneven || holds(row, Kind::packed);
  add_others(row, kind);
  return kind;
}

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
  TORCH_CHECK_TYPE(
      rows, "the batch holds no tensor or array that could be split (type: ", type_name(batch),
      "); pass a tensor, a structure of tensors, or size_fn and split_fn");
  return *rows;
}

std::optional<int64_t> Splitter::rows_if_any(const py::handle& batch,
                                             const std::string& name) const {
  const auto found = RowFinder(name)(batch, batch_dim_);
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
