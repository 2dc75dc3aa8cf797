#pragma once
#include <brimful/export.h>

#include <cstdint>

namespace brimful::pipeline {

/// Whether a stage's forward runs once more in its backward.
enum class Recompute : uint8_t {
  no,
  compared,  ///< yes, and what it returns is compared with what it returned first
  yes
};

/// True within such a second forward, on its thread.
BRIMFUL_API bool runs_again();

}  // namespace brimful::pipeline
