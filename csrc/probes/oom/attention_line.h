#pragma once
#include <brimful/export.h>
#include <brimful/memory/live_table.h>

namespace brimful::probes {

/// Whether a line of the program, by its text and its function's name, computes attention scores. Reads its file; false
/// where there is none. Never throws.
BRIMFUL_API bool is_attention(const memory::Site& site) noexcept;

}  // namespace brimful::probes
