#pragma once
#include <brimful/memory/live_table.h>

namespace brimful::memory {

constexpr uint8_t kNoCategory = 0xff;

/// Where a thread stands when it takes or gives back memory.
struct Moment {
  uint32_t step = 0;
  uint32_t backwards = 0;  ///< how often a backward has begun, or gone on after a forward within it
  uint32_t site = kNoSite;
  uint32_t module = kNoSite;
  Phase phase = Phase::other;
  uint8_t category = kNoCategory;
};

/// With the site: for births.
Moment moment_of_birth() noexcept;
/// Without: for deaths. Takes no lock.
Moment moment_of_death() noexcept;

/// An optimizer's step on this thread, for hooks, which an exception may leave without a pair: it counts while gradients
/// are not recorded, as in steps, and outside backward.
BRIMFUL_API void set_optimizer_phase(bool in_optimizer) noexcept;
/// ModuleScope for hooks. Leaving more often than entering does nothing.
BRIMFUL_API void enter_module(uint32_t name);
BRIMFUL_API void leave_module() noexcept;

/// What this thread's graph has from now on is a new forward's.
void forget_forward() noexcept;
void next_step() noexcept;
/// Counts from 0 again.
void begin_steps() noexcept;
/// Whether there was a backward since begin_steps. Seen where it takes or gives back memory.
bool backward_ran() noexcept;
/// Whether a backward since begin_steps has kept its graph (retain_graph=True). Seen where it takes or gives back memory.
bool graphs_were_kept() noexcept;

}  // namespace brimful::memory
