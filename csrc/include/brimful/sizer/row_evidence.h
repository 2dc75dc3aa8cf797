#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// Whether a list of a batch holds a column in each entry, or a row: the whole batch shows it. Plain data.
namespace brimful::detail {

using Rows = std::optional<int64_t>;

/// What a list's entries are, and so how much its length says of the batch's rows.
enum class Entries : uint8_t {
  tensors,  ///< or numbers, such as labels; two of these are a size as well
  plain,  ///< texts, lists, metadata, tensors without a dimension: columns are made of no such things
  lists,  ///< lists of alike tensors: pairs of columns, samples that are pairs, or columns that are lists of rows
  records,  ///< structures of tensors with as many rows each, if these are columns
  samples,  ///< structures that hold what a column does not have beside tensors: texts, numbers, tensors of other sizes
};

/// A list alone is one of columns up to a triplet; more entries may be either.
constexpr int64_t kMostColumns = 3;

/// A list whose entries are alike, or all without rows.
struct AlikeList {
  std::string name;
  int64_t length = 0;
  Rows
      column_rows;  ///< of its tensors, as columns; nothing: there are none, or without a dimension
  bool uneven = false;  ///< they differ in that: these are no columns
  Entries entries = Entries::tensors;
  int64_t fewest_dims = 2;  ///< of its tensors
  int64_t most_dims = 2;
};

enum class Reading : uint8_t { columns, rows };

/// What lists were taken for in earlier batches, by their names: the last, smaller batch of an epoch may leave it open.
class BRIMFUL_API ListReadings {
 public:
  std::optional<Reading> find(const AlikeList& list) const;
  void keep(const AlikeList& list, Reading reading);

 private:
  struct Seen {
    Reading reading = Reading::columns;
    int64_t length = 0;
  };
  std::map<std::string, Seen> seen_;
};

/// What a walk through a batch found.
struct RowEvidence {
  Rows rows;  ///< of tensors outside of these lists
  std::vector<AlikeList> lists;
};

/// The rows of the batch; nothing where nothing shows them. Keeps what lists were taken for.
/// @throws c10::ValueError if tensors disagree, or a list could be both
BRIMFUL_API Rows decide_rows(const RowEvidence& found, ListReadings& readings);
inline Rows decide_rows(const RowEvidence& found) {
  ListReadings none;
  return decide_rows(found, none);
}

/// What a list is in a batch of `rows`, which decide_rows() said.
BRIMFUL_API Reading reading_of(const AlikeList& list, int64_t rows, const ListReadings& readings);

}  // namespace brimful::detail
