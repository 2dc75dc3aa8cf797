#include "bindings/list_rows.h"

#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "bindings/batch_dim.h"
#include "bindings/ragged.h"
#include "bindings/split_types.h"

namespace brimful {
namespace {
/// Whose parts count: an array may be the row of a list, as a number is.
enum class Arrays : uint8_t { count, skip };

int64_t array_dims(const py::handle& array) {
  return array.attr("ndim").cast<int64_t>();
}

int64_t array_size(const py::handle& array, int64_t dim) {
  return py::object(array.attr("shape")[py::int_(dim)]).cast<int64_t>();
}

/// Which dimension it is, of what has some.
int64_t checked_dim(const py::handle& part, int64_t dims, int64_t dim, const std::string& path) {
  TORCH_CHECK_VALUE(dim >= -dims && dim < dims,
                    "a tensor of the batch lacks the dimension of its rows (", path, ": ",
                    py::str(part.attr("shape")).cast<std::string>(), ", batch_dim: ", dim,
                    "); give each tensor its own in batch_dim");
  return c10::maybe_wrap_dim(dim, dims);
}

bool is_number(const py::handle& object) {
  return part_kind(object) == Kind::whole && PyNumber_Check(object.ptr()) != 0 &&
         (!is_array(object) || array_dims(object) == 0);
}

/// Whether a part has rows of its own, whatever it is in.
bool holds_rows(const py::handle& object, Arrays arrays) {
  if (const auto own = own_split_of(object)) {
    return !own->rows_of.is_none();
  }
  const auto kind = part_kind(object);
  if (!has_entries(kind)) {
    return kind != Kind::whole ||
           (arrays == Arrays::count && is_array(object) && array_dims(object) > 0);
  }
  const WalkDepth depth;
  const auto entries = entries_of(object, kind);
  return std::any_of(entries.begin(), entries.end(),
                     [&](const Entry& entry) { return holds_rows(entry.value, arrays); });
}

bool alike(const py::handle& a, const py::handle& b);

/// Of two dicts those keys count that both have, of which there is one: samples may lack some. Lists in samples may have
/// other lengths.
bool alike_entries(const py::handle& a, const py::handle& b, Kind kind) {
  const auto first = entries_of(a, kind);
  const auto second = entries_of(b, kind);
  const auto same = [](const Entry& x, const Entry& y) {
    return x.value.is_none() || y.value.is_none() || alike(x.value, y.value);
  };
  if (kind == Kind::list && first.size() != second.size()) {
    return first.empty() || std::all_of(second.begin(), second.end(), [&](const Entry& entry) {
             return same(first.front(), entry);
           });
  }
  if (kind != Kind::mapping) {
    return std::equal(first.begin(), first.end(), second.begin(), second.end(), same);
  }
  bool shared = first.empty() && second.empty();
  for (const auto& x : first) {
    const auto y = std::find_if(second.begin(), second.end(),
                                [&](const Entry& entry) { return entry.key.equal(x.key); });
    shared = shared || y != second.end();
    if (y != second.end() && !same(x, *y)) {
      return false;
    }
  }
  return shared;
}

bool alike(const py::handle& a, const py::handle& b) {
  if (a.is(b)) {
    return true;
  }
  const auto kind = part_kind(a);
  if (part_kind(b) != kind) {
    return false;
  }
  if (kind == Kind::tensor) {
    const auto& x = THPVariable_Unpack(a.ptr());
    const auto& y = THPVariable_Unpack(b.ptr());
    return x.dim() == y.dim() && x.dtype() == y.dtype() && x.layout() == y.layout();
  }
  if (is_number(a) && is_number(b)) {
    return true;
  }
  if (!py::type::handle_of(a).is(py::type::handle_of(b))) {
    return false;
  }
  if (has_entries(kind)) {
    const WalkDepth depth;
    return !holds_rows(a, Arrays::count) || alike_entries(a, b, kind);
  }
  return !is_array(a) || (array_dims(a) == array_dims(b) && a.attr("dtype").equal(b.attr("dtype")));
}

bool all_alike(const std::vector<Entry>& entries) {
  return !entries.empty() && std::all_of(entries.begin(), entries.end(), [&](const Entry& entry) {
    return alike(entries.front().value, entry.value);
  });
}

/// A tensor's or array's; nothing for what is neither.
std::optional<int64_t> dims_of(const py::handle& object, Kind kind) {
  if (kind == Kind::tensor) {
    return THPVariable_Unpack(object.ptr()).dim();
  }
  return kind == Kind::whole && is_array(object) ? std::optional(array_dims(object)) : std::nullopt;
}

/// What an entry says of the list, if that holds columns. False: part of it is no column of tensors or arrays, but has
/// rows, such as a PackedSequence.
bool add_columns(const py::handle& object, int64_t dim, detail::AlikeList& list) {
  if (const auto own = own_split_of(object)) {
    return own->rows_of.is_none();
  }
  const auto kind = part_kind(object);
  if (has_entries(kind)) {
    const WalkDepth depth;
    const auto entries = entries_of(object, kind);
    return std::all_of(entries.begin(), entries.end(),
                       [&](const Entry& entry) { return add_columns(entry.value, dim, list); });
  }
  const auto dims = dims_of(object, kind);
  if (!dims) {
    return kind == Kind::whole;
  }
  if (*dims == 0) {
    return true;
  }
  list.fewest_dims = list.most_dims == 0 ? *dims : std::min(list.fewest_dims, *dims);
  list.most_dims = std::max(list.most_dims, *dims);
  if (dim < -*dims || dim >= *dims) {
    list.uneven = true;
    return true;
  }
  const auto rows = rows_of_leaf(object, kind, dim, list.name);
  list.uneven = list.uneven || (list.column_rows && list.column_rows != rows);
  list.column_rows = list.column_rows ? list.column_rows : rows;
  return true;
}

/// Looks through one entry of a list for what no column has beside tensors.
class SampleSigns {
 public:
  explicit SampleSigns(int64_t dim) : dim_(dim) {}

  void look(const py::handle& object) {
    if (object.is_none() || own_split_of(object)) {
      return;
    }
    const auto kind = part_kind(object);
    if (is_list(object, kind) && !holds_rows(object, Arrays::count)) {
      lengths_.push_back(static_cast<int64_t>(py::len(object)));
    } else if (has_entries(kind)) {
      const WalkDepth depth;
      for (const auto& entry : entries_of(object, kind)) {
        look(entry.value);
      }
    } else if (const auto dims = dims_of(object, kind); dims.value_or(0) == 0) {
      single_ = true;
    } else if (dim_ >= -*dims && dim_ < *dims) {
      sizes_.push_back(*rows_of_leaf(object, kind, dim_, ""));
    }
  }

  size_t tensors() const { return sizes_.size(); }

  bool found() const {
    const auto other = [&](int64_t size) { return size != sizes_.front(); };
    return !sizes_.empty() && (single_ || std::any_of(sizes_.begin(), sizes_.end(), other) ||
                               std::any_of(lengths_.begin(), lengths_.end(), other));
  }

 private:
  int64_t dim_;
  bool single_ = false;  ///< a text, a number, a tensor without a dimension
  std::vector<int64_t> sizes_;
  std::vector<int64_t>
      lengths_;  ///< of lists that hold no tensors: a column of texts has as many as a tensor rows
};

detail::Entries entries_kind(const std::vector<Entry>& entries, bool lists, int64_t dim) {
  const auto kind = part_kind(entries.front().value);
  if (lists) {
    return detail::Entries::lists;
  }
  if (!has_entries(kind)) {
    const auto dims = dims_of(entries.front().value, kind);
    return kind == Kind::tensor && dims == 0 ? detail::Entries::plain : detail::Entries::tensors;
  }
  std::optional<size_t> tensors;
  const bool samples = std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
    SampleSigns signs(dim);
    signs.look(entry.value);
    const bool others = tensors && tensors != signs.tensors();
    tensors = signs.tensors();
    return others || signs.found();
  });
  return samples ? detail::Entries::samples : detail::Entries::records;
}

bool same_shapes(const std::vector<Entry>& entries) {
  return std::all_of(entries.begin(), entries.end(), [&](const Entry& entry) {
    return entry.value.attr("shape").equal(entries.front().value.attr("shape"));
  });
}

/// A tuple that is the batch has fields, unless so many of its entries are alike that each may be a sample.
bool has_fields(const std::vector<Entry>& entries) {
  const auto kind = part_kind(entries.front().value);
  const bool many = entries.size() > static_cast<size_t>(detail::kMostColumns);
  if (has_entries(kind)) {
    return !(many || kind == Kind::mapping || kind == Kind::dataclass);
  }
  return !many || !dims_of(entries.front().value, kind) || !same_shapes(entries);
}

bool is_array_of(const py::handle& object, int64_t rows) {
  return is_array(object) && array_dims(object) > 0 && array_size(object, 0) == rows;
}
}  // namespace

std::optional<int64_t> rows_of_leaf(const py::handle& leaf, Kind kind, int64_t dim,
                                    const std::string& path) {
  if (kind == Kind::packed) {
    return packed_rows(leaf);
  }
  if (kind == Kind::whole) {
    if (is_array(leaf)) {
      const auto dims = array_dims(leaf);
      return dims == 0 ? std::nullopt
                       : std::optional(array_size(leaf, checked_dim(leaf, dims, dim, path)));
    }
    TORCH_CHECK_TYPE(is_plain(leaf),
                     "this part of the batch is neither cut into rows nor said to be whole (", path,
                     ": ", type_name(leaf),
                     "); say how it is cut with register_split, or with None in batch_dim "
                     "(a Pipeline's kwargs_dim for a keyword) that every piece gets it whole");
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

bool is_list(const py::handle& object, Kind kind) {
  return kind == Kind::list || PyTuple_CheckExact(object.ptr());
}

std::optional<detail::AlikeList> alike_list(const py::handle& object, Kind kind,
                                            const py::object& batch_dim, const std::string& path) {
  if (!is_list(object, kind) || mirrors(batch_dim) || batch_dim.is_none()) {
    return std::nullopt;
  }
  const WalkDepth depth;
  const auto entries = entries_of(object, kind);
  if (!all_alike(entries)) {
    return std::nullopt;
  }
  const auto& first = entries.front().value;
  if (!is_number(first) && !holds_rows(first, Arrays::count)) {
    return std::nullopt;
  }
  const auto first_kind = part_kind(first);
  // A few lists of lists are structure; each inner one is looked at by itself.
  const bool lists = has_entries(first_kind) && is_list(first, first_kind) &&
                     all_alike(entries_of(first, first_kind));
  const bool is_batch = kind == Kind::tuple && path == "batch";
  if ((lists && std::ssize(entries) <= detail::kMostColumns) || (is_batch && has_fields(entries))) {
    return std::nullopt;
  }
  const auto dim = batch_dim.cast<int64_t>();
  detail::AlikeList list{path, std::ssize(entries), {}, false, entries_kind(entries, lists, dim), 0,
                         0};
  const bool are_columns_or_rows =
      std::all_of(entries.begin(), entries.end(),
                  [&](const Entry& entry) { return add_columns(entry.value, dim, list); });
  const bool only_one =
      list.entries == detail::Entries::records && is_batch && list.length <= detail::kMostColumns;
  return are_columns_or_rows && !only_one ? std::optional(std::move(list)) : std::nullopt;
}

bool waits_for_rows(const py::handle& object, Kind kind) {
  return is_list(object, kind) &&
         !holds_rows(object, kind == Kind::list ? Arrays::skip : Arrays::count);
}

detail::AlikeList plain_list(const py::handle& object, const std::string& path) {
  py::object type = py::none();
  bool one_type = true;
  for (const auto& entry : object) {
    if (!entry.is_none()) {
      const auto own = py::type::of(entry);
      one_type = one_type && (type.is_none() || type.is(own));
      type = own;
    }
  }
  return {path,
          static_cast<int64_t>(py::len(object)),
          {},
          false,
          one_type && !type.is_none() ? detail::Entries::plain : detail::Entries::tensors};
}

bool is_column(const py::handle& object, Kind kind, const std::optional<detail::AlikeList>& alike,
               int64_t rows, const detail::ListReadings& readings) {
  if (alike) {
    return reading_of(*alike, rows, readings) == detail::Reading::rows;
  }
  if (!is_list(object, kind) || static_cast<int64_t>(py::len(object)) != rows ||
      !waits_for_rows(object, kind)) {
    return false;
  }
  TORCH_CHECK_VALUE(
      rows < 2 || !std::all_of(object.begin(), object.end(),
                               [&](const auto& entry) { return is_array_of(entry, rows); }),
      "a list of the batch may hold a row in each entry, or a column (rows: ", rows,
      ", arrays: ", rows,
      " of as many rows each); pass a tuple of arrays, a list of tensors "
      "with a batch_dim each, or size_fn and split_fn");
  return true;
}

}  // namespace brimful
