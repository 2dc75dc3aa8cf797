#pragma once
#include <cstddef>
#include <functional>
#include <string>

namespace brimful::launch {

using ByteSink = std::function<size_t(const void* bytes, size_t count)>;

/// Writes a file beside `path`, brings it to the disk and renames it to `path`, which holds either the old file or the
/// whole new one at any time. `write` gives it bytes; an error of the file system is raised when it has returned.
/// @throws std::system_error where the file system refuses; what `write` throws
void replace_file(const std::string& path, const std::function<void(const ByteSink&)>& write);

}  // namespace brimful::launch
