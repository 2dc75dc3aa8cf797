#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace brimful::launch {

/// Waits until `size` processes have come to this place, and returns true; false where one of them does not come (its
/// `comes`), or `is_over()` says so first. The answer is in the store: it is the same for all, whoever dies meanwhile.
/// @throws std::exception where the store is gone
bool all_or_none(c10d::Store& store, const std::string& place, int64_t size, bool comes,
                 const std::function<bool()>& is_over);

/// Whether there is an answer.
inline bool is_decided(c10d::Store& store, const std::string& place) {
  return store.check({place});
}

}  // namespace brimful::launch
