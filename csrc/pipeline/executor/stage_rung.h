#pragma once
#include <brimful/export.h>

#include <cstdint>

namespace brimful::pipeline {

/// How a stage holds less for its backward.
enum class StageRung : uint8_t {
  none,
  compared,    ///< recomputed, and what it returns then is compared with what it returned first
  recomputed,  ///< its forward runs once more in its backward
  offloaded    ///< what it saves lies in a file, or on the host
};

constexpr bool is_recomputed(StageRung rung) {
  return rung == StageRung::compared || rung == StageRung::recomputed;
}

constexpr bool is_offloaded(StageRung rung) {
  return rung == StageRung::offloaded;
}

/// True within such a second forward, on its thread.
BRIMFUL_API bool runs_again();

}  // namespace brimful::pipeline
