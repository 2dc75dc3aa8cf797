#include "base/one_line.h"
#include <array>
#include <cstdint>

namespace brimful {
namespace {

bool is_tail(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

/// A character at the front of a text; no bytes where there is none.
struct Letter {
  size_t bytes = 0;
  uint32_t code = 0;
};

Letter first_letter(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  if (lead < 0x80) {
    return {1, lead};
  }
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  constexpr std::array<uint32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  if (lead < 0xc0 || lead >= 0xf8 || text.size() < bytes) {
    return {};
  }
  uint32_t code = lead & (0x7fU >> bytes);
  for (size_t k = 1; k < bytes; ++k) {
    if (!is_tail(text[k])) {
      return {};
    }
    code = code << 6 | (static_cast<unsigned char>(text[k]) & 0x3f);
  }
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  const bool is_valid = code >= kLeast[bytes] && code <= 0x10ffff && !is_surrogate;
  return is_valid ? Letter{bytes, code} : Letter{};
}

bool is_control(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029;
}

void add_escaped(std::string& out, char byte) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const auto bits = static_cast<unsigned char>(byte);
  switch (byte) {
    case '\n':
      out += "\\n";
      break;
    case '\r':
      out += "\\r";
      break;
    case '\t':
      out += "\\t";
      break;
    default:
      out += "\\x";
      out += kDigits[bits >> 4];
      out += kDigits[bits & 0xf];
  }
}

template <typename IsKept>
std::string escaped(std::string_view text, const IsKept& is_kept) {
  std::string out;
  while (!text.empty()) {
    const auto [bytes, code] = first_letter(text);
    if (bytes > 0 && is_kept(code)) {
      out += text.substr(0, bytes);
    } else {
      for (const char byte : text.substr(0, bytes > 0 ? bytes : 1)) {
        add_escaped(out, byte);
      }
    }
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return out;
}
}  // namespace

std::string one_line(std::string_view text) {
  return escaped(text, [](uint32_t code) { return !is_control(code); });
}

std::string as_utf8(std::string_view text) {
  return escaped(text, [](uint32_t code) { return code != 0; });
}

std::string_view first_bytes(std::string_view text, size_t most) {
  if (text.size() <= most) {
    return text;
  }
  while (most > 0 && is_tail(text[most])) {
    --most;
  }
  return text.substr(0, most);
}

}  // namespace brimful
