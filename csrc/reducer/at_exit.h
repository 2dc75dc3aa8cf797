#pragma once
#include <brimful/export.h>

#include <functional>

namespace brimful {

/// Reducers leave here how to let go of their process group.
void release_at_exit(std::function<void()> release);
/// Called before the interpreter ends; no reducer works after it.
BRIMFUL_API void release_groups();

}  // namespace brimful
