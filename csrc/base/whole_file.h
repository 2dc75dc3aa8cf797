#pragma once
#include <brimful/export.h>
#include <string>

namespace brimful {

/// @throws std::system_error where it cannot be read
BRIMFUL_API std::string read_file(const std::string& path);

/// The file has what it had or all of the text at any time (replace_file).
/// @throws std::system_error where it cannot be written, or is no regular file
BRIMFUL_API void write_file(const std::string& path, const std::string& text);

}  // namespace brimful
