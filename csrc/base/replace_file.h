#pragma once
#include <brimful/export.h>
#include <cstddef>
#include <functional>
#include <string>

namespace brimful {

using ByteSink = std::function<size_t(const void* bytes, size_t count)>;

enum class Durable : bool { no, yes };

/// Writes a new file beside `path`, of a name that cannot be foreseen, and renames it to `path`, which holds either the
/// old file or the whole new one at any time; what the old one allows to whom the new one does as well. With
/// `Durable::yes` both the file and its name are on the disk when this returns. `write` gives it bytes; an error of the
/// file system is raised when it has returned.
/// @throws std::system_error where the file system refuses, or where `path` is something else than a regular file (a
/// symbolic link, a FIFO, a device, a folder), which stays as it is; what `write` throws
BRIMFUL_API void replace_file(const std::string& path, Durable durable,
                              const std::function<void(const ByteSink&)>& write);

/// Adds to the end of a regular file, which is made where there is none.
/// @throws std::system_error as above
BRIMFUL_API void append_to_file(const std::string& path, const std::string& text);

}  // namespace brimful
