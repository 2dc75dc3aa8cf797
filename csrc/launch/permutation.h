#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace brimful::launch {

/// The numbers below `size`, in the order of an epoch; the same on all hosts.
std::vector<size_t> permutation(size_t size, uint64_t seed, uint64_t epoch, bool shuffle);

}  // namespace brimful::launch
