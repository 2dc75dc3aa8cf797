#include "base/pickle.h"
#include <limits>
#include "base/json.h"

namespace brimful {

void Pickle::add_bytes(uint64_t value, int count) {
  for (int k = 0; k < count; ++k) {
    out_ += static_cast<char>(value >> (8 * k));
  }
}

void Pickle::integer(int64_t value) {
  if (value >= 0) {
    unsigned_integer(static_cast<uint64_t>(value));
  } else {
    out_ += "\x8a\x08";  // LONG1
    add_bytes(static_cast<uint64_t>(value), 8);
  }
}

void Pickle::unsigned_integer(uint64_t value) {
  if (value <= std::numeric_limits<uint8_t>::max()) {
    out_ += 'K';  // BININT1
    add_bytes(value, 1);
  } else if (value <= std::numeric_limits<int32_t>::max()) {
    out_ += 'J';  // BININT
    add_bytes(value, 4);
  } else {
    const bool needs_sign = value > std::numeric_limits<int64_t>::max();
    out_ += needs_sign ? "\x8a\x09" : "\x8a\x08";  // LONG1
    add_bytes(value, 8);
    out_.append(needs_sign ? 1 : 0, '\0');
  }
}

void Pickle::text(const std::string& value) {
  if (const auto found = texts_.find(value); found != texts_.end()) {
    again(found->second);
    return;
  }
  const auto text = valid_utf8(value);
  out_ += 'X';  // BINUNICODE
  add_bytes(text.size(), 4);
  out_ += text;
  texts_.emplace(value, keep());
}

uint32_t Pickle::keep() {
  out_ += 'r';  // LONG_BINPUT
  add_bytes(kept_, 4);
  return kept_++;
}

void Pickle::again(uint32_t kept) {
  const bool is_short = kept <= std::numeric_limits<uint8_t>::max();
  out_ += is_short ? 'h' : 'j';  // BINGET, LONG_BINGET
  add_bytes(kept, is_short ? 1 : 4);
}

}  // namespace brimful
