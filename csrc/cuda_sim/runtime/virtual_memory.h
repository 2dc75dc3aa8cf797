#pragma once

namespace sim {

/// The driver's function of virtual memory that has this name, or null.
void* virtual_memory_function(const char* name);

}  // namespace sim
