#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <map>
#include <string>

namespace brimful {

/// The pieces that a forecast chose for a batch, and the room for which they are right: with it a resumed job goes on
/// without a rehearsal. Plain data.
struct BRIMFUL_API FoundPieces {
  uint32_t kind = 0;  ///< fingerprint of the batch's RowKind
  int64_t rows = 0;   ///< of the batch; 0: nothing was found
  int64_t pieces = 1;
  int64_t need_bytes = 0;   ///< beyond what is in use before the step
  int64_t fewer_bytes = 0;  ///< what one piece fewer would need; 0: there are no fewer

  bool holds(uint32_t of_kind, int64_t of_rows, int64_t room_bytes) const;
  /// Adds entries to a sizer's state.
  void put(std::map<std::string, double>& state) const;
  /// Nothing was found where entries are missing, as in the state of an older version.
  /// @throws c10::ValueError for numbers that put() never writes
  static FoundPieces of(const std::map<std::string, double>& state);
};

}  // namespace brimful
