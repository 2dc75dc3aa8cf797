#include "bindings/batch.h"

#include <brimful/sizer/split.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "bindings/batch_dim.h"
#include "bindings/list_rows.h"
#include "bindings/own_indexing.h"
#include "bindings/ragged.h"
#include "bindings/split_types.h"

namespace brimful {
namespace {

struct Found {
  int64_t rows = 0;
  std::string path;
};

void require_same(const Found& first, const Found& other) {
  TORCH_CHECK_VALUE(
      first.rows == other.rows, "tensors of the batch disagree in size (", first.path, ": ",
      first.rows, ", ", other.path, ": ", other.rows,
      "); give all the same first dimension, or a list an entry for each row, or say in batch_dim "
      "where rows are, or pass size_fn and split_fn");
}

/// Whether it is known by its name for the place of a row in each entry, as collate functions of speech and detection have
/// it.
bool holds_places(const Entry& entry) {
  static constexpr std::array<std::string_view, 7> kNames{
      "sequence_idx", "batch_idx", "batch_index", "batch_indices",
      "row_idx",      "row_index", "_idx_m"};
  if (!PyUnicode_Check(entry.key.ptr()) || !THPVariable_Check(entry.value.ptr())) {
    return false;
  }
  const auto& tensor = THPVariable_Unpack(entry.value.ptr());
  const auto name = entry.key.cast<std::string_view>();
  return tensor.dim() > 0 && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// Looks for the rows of a batch, which all its parts must have alike.
class RowFinder {
 public:
  RowFinder(std::string name, std::optional<int64_t> known, detail::ListReadings& readings)
      : name_(std::move(name)), known_(known), readings_(readings) {}

  std::optional<Found> operator()(const py::handle& batch, const py::object& batch_dim) {
    visit(batch, batch_dim, name_);
    open_lists_of_lists();
    const auto rows = decide();
    // Whether a list is cut by its entries depends on how many rows the rest has.
    for (size_t i = 0; i < lists_.size(); ++i) {  // NOLINT(modernize-loop-convert): it grows
      const auto list = lists_[i];
      if (list.opened) {
        continue;
      }
      const auto of_rest = found_ ? std::optional(found_->rows) : rows;
      if (!of_rest || !is_column(list.object, list.kind, list.alike, *of_rest, readings_)) {
        visit_entries(list.object, list.kind, list.batch_dim, list.path);
      }
    }
    return found_;
  }

 private:
  struct List {
    py::object object;
    Kind kind;
    py::object batch_dim;
    std::string path;
    std::optional<detail::AlikeList> alike;
    bool opened = false;
  };

  /// Lists of lists that have no entry for each row are structure.
  void open_lists_of_lists() {
    const auto rows = found_ ? std::optional(found_->rows) : known_;
    for (size_t i = 0; rows && i < lists_.size();
         ++i) {  // NOLINT(modernize-loop-convert): it grows
      const auto list = lists_[i];
      if (list.alike && list.alike->entries == detail::Entries::lists &&
          list.alike->length != *rows) {
        lists_[i].opened = true;
        visit_entries(list.object, list.kind, list.batch_dim, list.path);
      }
    }
  }

  /// What tensors outside of lists, the caller and the lists themselves say together.
  std::optional<int64_t> decide() {
    detail::RowEvidence evidence{found_ ? std::optional(found_->rows) : known_, {}};
    const detail::AlikeList* first = nullptr;
    for (const auto& list : lists_) {
      if (!list.alike) {
        evidence.lists.push_back(plain_list(list.object, list.path));
      } else if (!list.opened) {
        const auto& alike = *list.alike;
        first = first == nullptr && (alike.column_rows || alike.uneven) ? &alike : first;
        if (found_ && alike.column_rows && !alike.uneven && alike.length != found_->rows) {
          require_same({*alike.column_rows, alike.name + "[0]"}, *found_);  // no rows: columns
        }
        evidence.lists.push_back(alike);
      }
    }
    const auto rows = detail::decide_rows(evidence, readings_);
    if (!found_ && first != nullptr) {
      found_ = {rows.value(), first->name};
    }
    return rows;
  }

  void visit(const py::handle& object, const py::object& batch_dim, const std::string& path) {
    if (batch_dim.is_none() || object.is_none()) {
      return;
    }
    if (const auto own = own_split_of(object)) {
      return add(own_rows(*own, object), path);
    }
    const auto kind = part_kind(object);
    if (has_entries(kind)) {
      auto alike = alike_list(object, kind, batch_dim, path);
      if (alike || waits_for_rows(object, kind)) {
        lists_.push_back(
            {py::reinterpret_borrow<py::object>(object), kind, batch_dim, path, std::move(alike)});
        return;
      }
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
    const bool by_key = PyDict_Check(batch_dim.ptr());
    for (size_t i = 0; i < entries.size(); ++i) {
      const bool is_said = by_key && batch_dim.contains(entries[i].key);
      const auto inner = path + path_of(kind, entries[i]);
      TORCH_CHECK_VALUE(
          is_said || !holds_places(entries[i]),
          "an entry of the batch holds places of its rows, "
          "which are other places in a piece (",
          inner, "); pass size_fn and split_fn, or a batch_dim for the entry if it holds none");
      visit(entries[i].value, dims[i], inner);
    }
  }

  void add(std::optional<int64_t> rows, const std::string& path) {
    if (!rows) {
      return;
    }
    if (!found_) {
      found_ = {*rows, path};
    }
    require_same(*found_, {*rows, path});
  }

  std::string name_;
  std::optional<int64_t> known_;
  detail::ListReadings& readings_;
  std::optional<Found> found_;
  std::vector<List> lists_;
};

/// One piece of a batch.
class Cut {
 public:
  Cut(int64_t rows, int64_t begin, int64_t end, const detail::ListReadings& readings)
      : range_{rows, begin, end}, readings_(readings) {}

  py::object operator()(const py::handle& object, const py::object& batch_dim,
                        const std::string& path = "batch") {
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
        return of_structure(object, kind, batch_dim, path);
    }
  }

 private:
  py::object of_tensor(const py::handle& object, int64_t dim) const {
    const auto& tensor = THPVariable_Unpack(object.ptr());
    if (THPVariable_CheckExact(object.ptr()) || tensor.dim() == 0) {
      return py::cast(detail::slice_tensor(tensor, dim, range_));
    }
    return slice_subclass(object, dim, range_);
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
    py::object piece = object[py::tuple(index)];
    require_state_kept(object, piece, {}, range_.rows);
    return piece;
  }

  py::object of_structure(const py::handle& object, Kind kind, const py::object& batch_dim,
                          const std::string& path) {
    const WalkDepth depth;
    if (is_list(object, kind) && static_cast<int64_t>(py::len(object)) == range_.rows &&
        is_column(object, kind, alike_list(object, kind, batch_dim, path), range_.rows,
                  readings_)) {
      return column(object);
    }
    const auto before = entries_of(object, kind);
    const auto dims = batch_dims_of(batch_dim, object, kind, before, "batch");
    auto entries = before;
    for (size_t i = 0; i < entries.size(); ++i) {
      entries[i].value = (*this)(before[i].value, dims[i], path + path_of(kind, before[i]));
    }
    if (!mirrors(batch_dim)) {
      if (auto own = slice_structure(object, kind, entries, batch_dim.cast<int64_t>(), range_)) {
        return *own;
      }
    }
    py::object piece = rebuild(object, kind, before, entries);
    // A BatchEncoding of transformers holds what its tokenizer said of each row beside its entries.
    const py::object of_rows = py::getattr(piece, "_encodings", py::none());
    if (kind == Kind::mapping && PyList_Check(of_rows.ptr()) &&
        is_column(of_rows, Kind::list, {}, range_.rows, readings_)) {
      py::setattr(piece, "_encodings", column(of_rows));
    }
    require_state_kept(object, piece, before, range_.rows);
    return piece;
  }

  py::object column(const py::handle& list) const {
    py::object piece =
        py::reinterpret_borrow<py::object>(list)[py::slice(range_.begin, range_.end, 1)];
    if (PyList_CheckExact(piece.ptr()) && !PyList_CheckExact(list.ptr())) {
      piece = py::type::handle_of(list)(piece);
    }
    require_state_kept(list, piece, {}, range_.rows);
    return piece;
  }

  detail::Range range_;
  const detail::ListReadings& readings_;
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
                    "batch_dim has no effect with size_fn and split_fn (batch_dim: ",
                    py::repr(batch_dim_).cast<std::string>(), "); leave it out");
}

int64_t Splitter::rows_of(const py::handle& batch, std::optional<int64_t> known) const {
  if (size_fn_) {
    const py::object size = (*size_fn_)(batch);
    TORCH_CHECK_TYPE(PyIndex_Check(size.ptr()),
                     "size_fn returned no number of rows (type: ", type_name(size),
                     "); return an int");
    const auto rows = py::int_(size).cast<int64_t>();
    TORCH_CHECK_VALUE(rows >= 0, "size_fn returned a negative number of rows (rows: ", rows, ")");
    return rows;
  }
  const auto rows = rows_if_any(batch, "batch", known);
  TORCH_CHECK_TYPE(
      rows, "the batch holds no tensor or array that could be split (type: ", type_name(batch),
      "); pass a tensor, a structure of tensors, or size_fn and split_fn");
  return *rows;
}

std::optional<int64_t> Splitter::rows_if_any(const py::handle& batch, const std::string& name,
                                             std::optional<int64_t> known) const {
  const auto found = RowFinder(name, known, readings_)(batch, batch_dim_);
  return found ? std::optional<int64_t>(found->rows) : std::nullopt;
}

py::object Splitter::slice(const py::handle& batch, int64_t rows, int64_t begin,
                           int64_t end) const {
  return split_fn_ ? (*split_fn_)(batch, begin, end)
                   : Cut(rows, begin, end, readings_)(batch, batch_dim_);
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
      .def_property_readonly("copies", &KeptBatch::copies)
      .def("restore", &KeptBatch::restore, py::call_guard<py::gil_scoped_release>());
  py::class_<Splitter, std::shared_ptr<Splitter>>(m, "Splitter")
      .def(py::init<const py::object&, std::optional<py::function>, std::optional<py::function>>(),
           py::kw_only(), py::arg("batch_dim") = 0, py::arg("size_fn") = py::none(),
           py::arg("split_fn") = py::none())
      .def(
          "rows_of",
          [](const Splitter& splitter, const py::object& batch) { return splitter.rows_of(batch); },
          py::arg("batch"))
      .def("slice", &Splitter::slice, py::arg("batch"), py::arg("rows"), py::arg("begin"),
           py::arg("end"));
}

}  // namespace brimful
