#pragma once
#include <brimful/memory/live_table.h>

namespace brimful::memory {

/// Whoever can look at this thread's frames gives its site; kNoSite where there is none, and in backward where the engine
/// is nearer than any user's frame. Called at allocations, under allocators' locks: no GIL, no exception, no tensor.
using SiteProvider = uint32_t (*)(bool in_backward) noexcept;
BRIMFUL_API void set_site_provider(SiteProvider provider) noexcept;
SiteProvider site_provider() noexcept;

void lock_sites();
void unlock_sites();

}  // namespace brimful::memory
