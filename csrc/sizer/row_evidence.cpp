#include <brimful/sizer/row_evidence.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace brimful::detail {
namespace {
// A pair of tensors is a pair of columns, such as inputs and targets: no batch has two rows only.
constexpr int64_t kFewColumns = 2;

bool holds_tensors(const AlikeList& list) {
  return list.column_rows.has_value() || list.uneven;
}

bool are_columns_of(const AlikeList& list, int64_t rows) {
  return !list.uneven && list.column_rows == rows;
}

[[noreturn]] void refuse_list(const AlikeList& list) {
  TORCH_CHECK_VALUE(
      false, "a list of the batch may hold a row in each entry, or a column (", list.name, ": ",
      list.length, " tensors of ", list.column_rows.value_or(0),
      " rows each if they are columns); stack rows into one tensor, give columns a batch_dim each, "
      "as in batch_dim=[0, 0, 0], or pass size_fn and split_fn");
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
    } else if (!readings.find(list) && list.length > kFewColumns) {
      refuse_list(list);
    }
  }
}

Rows as_read(Reading reading, const std::vector<AlikeList>& lists, ListReadings& readings) {
  for (const auto& list : lists) {
    readings.keep(list, reading);
  }
  return reading == Reading::rows ? lists.front().length : lists.front().column_rows;
}

/// Lists alone: `tensors` among them hold tensors, all lists say what they say by their length.
Rows decide_by_lists(const std::vector<AlikeList>& tensors, const std::vector<AlikeList>& all,
                     ListReadings& readings) {
  const auto& first = tensors.front();
  const auto seen = readings.find(first);
  const auto every = [&](const auto& holds) {
    return std::all_of(tensors.begin(), tensors.end(), holds);
  };
  const bool rows = every([&](const auto& list) { return list.length == first.length; });
  const bool columns = every([&](const auto& list) {
    return !first.uneven && are_columns_of(list, first.column_rows.value_or(0));
  });
  const auto also = [&](int64_t length) {
    return std::any_of(all.begin(), all.end(), [&](const auto& list) {
      return !holds_tensors(list) && list.length == length;
    });
  };
  const bool supported = tensors.size() > 1 || also(first.length);
  if (!columns) {
    if (!rows || !supported || (first.length <= kFewColumns && seen != Reading::rows)) {
      const auto other = std::find_if(tensors.begin(), tensors.end(), [&](const auto& list) {
        return list.uneven || list.column_rows != first.column_rows;
      });
      disagree(*other, first.column_rows.value_or(first.length));
    }
    return as_read(Reading::rows, tensors, readings);
  }
  if (!rows) {
    return as_read(Reading::columns, tensors, readings);
  }
  if (seen) {
    return as_read(*seen, tensors, readings);
  }
  const bool second = also(first.length);
  if (second && !also(*first.column_rows) && first.length > kFewColumns) {
    return as_read(Reading::rows, tensors, readings);
  }
  const bool few = first.length <= kFewColumns;
  if (second || (!few && (tensors.size() > 1 || first.length >= *first.column_rows))) {
    refuse_list(first);
  }
  return as_read(Reading::columns, tensors, readings);
}
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
  std::vector<AlikeList> tensors;
  std::copy_if(found.lists.begin(), found.lists.end(), std::back_inserter(tensors), holds_tensors);
  return tensors.empty() ? std::nullopt : decide_by_lists(tensors, found.lists, readings);
}

Reading reading_of(const AlikeList& list, int64_t rows, const ListReadings& readings) {
  if (list.length != rows) {
    return Reading::columns;
  }
  return are_columns_of(list, rows) ? readings.find(list).value_or(Reading::columns)
                                    : Reading::rows;
}

}  // namespace brimful::detail
