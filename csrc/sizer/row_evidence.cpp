#include <brimful/sizer/row_evidence.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace brimful::detail {
namespace {
// A pair of tensors is a pair of columns, such as inputs and targets: no batch has two rows only.
constexpr int64_t kFewColumns = 2;

bool holds_tensors(const AlikeList& list) {
  return list.column_rows.has_value() || list.uneven;
}

/// Its length is that of the batch, however few rows there are.
bool is_evidence(const AlikeList& list) {
  return list.entries == Entries::plain || list.entries == Entries::samples;
}

bool are_columns_of(const AlikeList& list, int64_t rows) {
  return !list.uneven && list.column_rows == rows;
}

[[noreturn]] void refuse_list(const AlikeList& list) {
  TORCH_CHECK_VALUE(
      false, "a list of the batch may hold a row in each entry, or a column (", list.name, ": ",
      list.length, " tensors of ", list.column_rows.value_or(0),
      " rows each if they are columns); stack rows into one tensor, give columns a batch_dim each, "
      "for this list [0] * ",
      list.length, ", or pass size_fn and split_fn");
}

[[noreturn]] void disagree(const AlikeList& list, int64_t rows) {
  TORCH_CHECK_VALUE(
      false, "tensors of the batch disagree in size (rows: ", rows, ", ", list.name, ": ",
      list.length, " entries",
      list.uneven ? " of several sizes"
                  : " of " + std::to_string(list.column_rows.value_or(0)) + " rows",
      "); give all the same first dimension, or say in batch_dim where rows are, or pass size_fn "
      "and split_fn");
}

/// Outside of lists there are tensors, with `rows`.
void check_lists(int64_t rows, const std::vector<AlikeList>& lists, ListReadings& readings) {
  for (const auto& list : lists) {
    if (!holds_tensors(list)) {
      continue;
    }
    const bool columns = are_columns_of(list, rows);
    if (list.length != rows && !columns) {
      disagree(list, rows);
    }
    if (list.length != rows || !columns) {
      readings.keep(list, columns ? Reading::columns : Reading::rows);
    } else if (list.entries != Entries::samples && !readings.find(list) &&
               list.length > kFewColumns) {
      refuse_list(list);
    }
  }
}

/// Lists alone, of which some hold tensors: all lists say what they say by their length.
class ListsAlone {
 public:
  ListsAlone(const std::vector<AlikeList>& all, ListReadings& readings)
      : all_(all), readings_(readings) {
    std::copy_if(all.begin(), all.end(), std::back_inserter(tensors_), holds_tensors);
  }

  Rows decide() {
    if (tensors_.empty()) {
      return std::nullopt;
    }
    const auto& first = tensors_.front();
    const bool rows = every([&](const auto& list) { return list.length == first.length; });
    const bool columns = every([&](const auto& list) {
      return !first.uneven && are_columns_of(list, first.column_rows.value_or(0));
    });
    if (!columns || (!rows && some(Entries::samples))) {
      require(rows && (tensors_.size() > 1 || is_structure(first) || says(first.length)));
      return as(Reading::rows);
    }
    return as(rows ? of_both() : Reading::columns);
  }

 private:
  /// Rows as well as columns may be in them.
  Reading of_both() const {
    const auto& first = tensors_.front();
    const auto columns = *first.column_rows;
    const bool both = columns == first.length;
    const bool by_columns = !both && says(columns);
    if (some(Entries::samples) || (some(Entries::records) && some(Entries::tensors))) {
      return Reading::rows;
    }
    if (proves(first.length) && !both && !by_columns) {
      return Reading::rows;
    }
    if (const auto seen = readings_.find(first)) {
      return *seen;
    }
    if (says(first.length)) {  // as two numbers do, a size or two labels
      if (both || by_columns || first.length <= kFewColumns) {
        refuse_list(first);
      }
      return Reading::rows;
    }
    return by_columns ? Reading::columns : of_nothing_else();
  }

  /// No list beside them says anything.
  Reading of_nothing_else() const {
    const auto& first = tensors_.front();
    const auto fewest = [](const auto& a, const auto& b) { return a.fewest_dims < b.fewest_dims; };
    const auto most = [](const auto& a, const auto& b) { return a.most_dims < b.most_dims; };
    const auto [low, high] =
        std::pair(std::min_element(tensors_.begin(), tensors_.end(), fewest)->fewest_dims,
                  std::max_element(tensors_.begin(), tensors_.end(), most)->most_dims);
    if (some(Entries::records) && high == 1) {  // such as blocks of tokens with labels
      return Reading::rows;
    }
    const bool few = first.length <= kFewColumns;
    if (first.length > kMostColumns || (some(Entries::records) && low != high) ||
        (!few && (tensors_.size() > 1 || first.length >= *first.column_rows))) {
      refuse_list(first);
    }
    return Reading::columns;
  }

  template <typename Holds>
  bool every(const Holds& holds) const {
    return std::all_of(tensors_.begin(), tensors_.end(), holds);
  }
  bool some(Entries entries) const {
    return std::any_of(tensors_.begin(), tensors_.end(),
                       [&](const auto& list) { return list.entries == entries; });
  }
  static bool is_structure(const AlikeList& list) {
    return list.entries == Entries::records || list.entries == Entries::samples;
  }
  bool says(int64_t length) const {
    return std::any_of(all_.begin(), all_.end(), [&](const auto& list) {
      return !holds_tensors(list) && list.length == length;
    });
  }
  bool proves(int64_t length) const {
    return std::any_of(all_.begin(), all_.end(), [&](const auto& list) {
      return is_evidence(list) && list.length == length;
    });
  }
  void require(bool holds) const {
    const auto& first = tensors_.front();
    if (!holds) {
      const auto other = std::find_if(tensors_.begin(), tensors_.end(), [&](const auto& list) {
        return list.uneven || list.column_rows != first.column_rows;
      });
      disagree(other == tensors_.end() ? first : *other, first.column_rows.value_or(first.length));
    }
  }
  Rows as(Reading reading) {
    for (const auto& list : tensors_) {
      readings_.keep(list, reading);
    }
    return reading == Reading::rows ? tensors_.front().length : tensors_.front().column_rows;
  }

  const std::vector<AlikeList>& all_;
  std::vector<AlikeList> tensors_;
  ListReadings& readings_;
};
}  // namespace

std::optional<Reading> ListReadings::find(const AlikeList& list) const {
  const auto found = seen_.find(list.name);
  if (found == seen_.end() ||
      (found->second.reading == Reading::columns && found->second.length != list.length)) {
    return std::nullopt;
  }
  return found->second.reading;
}

void ListReadings::keep(const AlikeList& list, Reading reading) {
  seen_[list.name] = {reading, list.length};
}

Rows decide_rows(const RowEvidence& found, ListReadings& readings) {
  if (found.rows) {
    check_lists(*found.rows, found.lists, readings);
    return found.rows;
  }
  return ListsAlone(found.lists, readings).decide();
}

Reading reading_of(const AlikeList& list, int64_t rows, const ListReadings& readings) {
  if (list.length != rows) {
    return Reading::columns;
  }
  return are_columns_of(list, rows) && list.entries != Entries::samples
             ? readings.find(list).value_or(Reading::columns)
             : Reading::rows;
}

}  // namespace brimful::detail
