#pragma once

namespace sim {

/// Remembers the name of a kernel that a library brings.
void know_kernel(const void* function, const char* name);
/// Its mangled name, or "?".
const char* kernel_name(const void* function);

}  // namespace sim
