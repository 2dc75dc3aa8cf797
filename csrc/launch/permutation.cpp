#include "launch/permutation.h"

#include <numeric>
#include <random>
#include <utility>

namespace brimful::launch {

std::vector<size_t> permutation(size_t size, uint64_t seed, uint64_t epoch, bool shuffle) {
  std::vector<size_t> all(size);
  std::iota(all.begin(), all.end(), size_t{0});
  if (shuffle) {
    // std::shuffle may differ between standard libraries, and so between hosts.
    std::seed_seq of_both{seed, seed >> 32, epoch, epoch >> 32};
    std::mt19937_64 random(of_both);
    for (size_t left = size; left > 1; --left) {
      std::swap(all[left - 1], all[random() % left]);
    }
  }
  return all;
}

}  // namespace brimful::launch
