#include "sizer/found_pieces.h"
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace brimful {
namespace {
using Field = std::pair<const char*, int64_t FoundPieces::*>;
constexpr std::array<Field, 4> kFields{
    Field{"found_rows", &FoundPieces::rows},
    Field{"found_pieces", &FoundPieces::pieces},
    Field{"found_need_bytes", &FoundPieces::need_bytes},
    Field{"found_fewer_bytes", &FoundPieces::fewer_bytes},
};
constexpr const char* kKind = "found_kind";
constexpr double kLargest = 1e15;  // of what a double counts exactly
}  // namespace

bool FoundPieces::holds(uint32_t of_kind, int64_t of_rows, int64_t room_bytes) const {
  return rows > 0 && kind == of_kind && rows == of_rows && need_bytes <= room_bytes &&
         (fewer_bytes == 0 || room_bytes < fewer_bytes);
}

void FoundPieces::put(std::map<std::string, double>& state) const {
  state[kKind] = kind;
  for (const auto& [name, field] : kFields) {
    state[name] = static_cast<double>(this->*field);
  }
}

FoundPieces FoundPieces::of(const std::map<std::string, double>& state) {
  FoundPieces found;
  const auto number = [&](const char* name, double most) -> double {
    const double value = state.at(name);
    TORCH_CHECK_VALUE(value >= 0 && value <= most,
                      "the sizer's state is not one that state_dict gave (", name, ": ", value,
                      ")");
    return value;
  };
  if (state.count(kKind) == 0) {
    return found;
  }
  found.kind = static_cast<uint32_t>(number(kKind, std::numeric_limits<uint32_t>::max()));
  for (const auto& [name, field] : kFields) {
    if (state.count(name) == 0) {
      return {};
    }
    found.*field = static_cast<int64_t>(number(name, kLargest));
  }
  TORCH_CHECK_VALUE(found.pieces >= 1 && found.pieces <= std::max<int64_t>(found.rows, 1),
                    "the sizer's state is not one that state_dict gave (found_rows: ", found.rows,
                    ", found_pieces: ", found.pieces, ")");
  return found;
}

}  // namespace brimful
