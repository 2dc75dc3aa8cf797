#pragma once
#include <brimful/export.h>
#include <string>

namespace brimful {

/// @throws std::system_error where it cannot be read
BRIMFUL_API std::string read_file(const std::string& path);

/// Replaces what the file had.
/// @throws std::system_error where it cannot be written
BRIMFUL_API void write_file(const std::string& path, const std::string& text);

}  // namespace brimful
