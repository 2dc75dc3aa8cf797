#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <functional>

namespace brimful {

/// Reducers register here how to let go of their process group, and take it back when they die.
BRIMFUL_API void release_at_exit(const void* owner, std::function<void()> release);
BRIMFUL_API void forget_at_exit(const void* owner);
/// How many are registered.
BRIMFUL_API int64_t registered_at_exit();
/// Called before the interpreter ends; no reducer works after it.
BRIMFUL_API void release_groups();

}  // namespace brimful
