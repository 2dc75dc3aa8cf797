#pragma once
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace brimful {

/// FNV-1a of bytes in order, of 32 or 64 bits. Files keep such numbers and ranks compare them, so that they never change.
template <typename Number>
class Fnv {
  static_assert(std::is_same_v<Number, uint32_t> || std::is_same_v<Number, uint64_t>);

 public:
  constexpr void add(uint8_t byte) { value_ = (value_ ^ byte) * kPrime; }
  constexpr void add(std::string_view bytes) {
    for (const char byte : bytes) {
      add(static_cast<uint8_t>(byte));
    }
  }
  /// Its eight bytes, the lowest first.
  constexpr void add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) {
      add(static_cast<uint8_t>(number >> shift));
    }
  }
  /// All eight bytes at once: faster, and another value than one by one.
  constexpr void add_word(uint64_t word) {
    value_ = (value_ ^ static_cast<Number>(word ^ (word >> 29))) * kPrime;
  }
  constexpr Number value() const { return value_; }

 private:
  static constexpr bool kIsWide = sizeof(Number) == 8;
  static constexpr auto kPrime = static_cast<Number>(kIsWide ? 0x100000001b3ULL : 0x1000193ULL);
  Number value_ = static_cast<Number>(kIsWide ? 0xcbf29ce484222325ULL : 0x811c9dc5ULL);
};

}  // namespace brimful
