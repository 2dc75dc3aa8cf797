#pragma once
#include <brimful/ladder/checkpoint_call.h>
#include <c10/util/StringUtil.h>

namespace brimful::ladder {

/// Throws CannotRunAgain with these parts as its message.
template <typename... Parts>
[[noreturn]] void refuse_second_run(const Parts&... parts) {
  throw CannotRunAgain({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(parts...));
}

}  // namespace brimful::ladder
