#pragma once
#include <brimful/export.h>
#include <string>
#include <string_view>

namespace brimful {

/// The text as UTF-8 without what would break a line or drive a terminal: control characters, line and paragraph
/// separators and bytes that are no UTF-8 are written as "\n", "\t" or "\x1b".
BRIMFUL_API std::string one_line(std::string_view text);

/// The same with line breaks and tabs as they are: for a text that goes to another language or rank.
BRIMFUL_API std::string as_utf8(std::string_view text);

/// At most the first `most` bytes, and no part of a character.
BRIMFUL_API std::string_view first_bytes(std::string_view text, size_t most);

}  // namespace brimful
