#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <string>

namespace brimful {

/// "512 B", "1.5 KiB", "23.4 MiB": one decimal, rounded to the nearest, whatever the locale.
BRIMFUL_API std::string format_bytes(int64_t bytes);

}  // namespace brimful
