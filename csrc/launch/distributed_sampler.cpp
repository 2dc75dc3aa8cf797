#include <brimful/launch/distributed_sampler.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "launch/permutation.h"

namespace brimful {

DistributedSampler::DistributedSampler(size_t size, int rank, int world_size,
                                       DistributedSamplerOptions options)
    : size_(size), rank_(rank), world_size_(world_size), options_(options) {
  TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "need 0 <= rank < world_size (rank: ", rank,
                    ", world_size: ", world_size, ")");
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  size_ = new_size.value_or(size_);
  const auto all = launch::permutation(size_, options_.seed, next_epoch_, options_.shuffle);
  own_.clear();
  for (size_t i = rank_; i < size_; i += world_size_) {
    own_.push_back(all[i]);
  }
  position_ = 0;
  begun_ = true;
  ++next_epoch_;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  TORCH_CHECK_VALUE(batch_size > 0, "the batch size must be positive (batch_size: 0)");
  if (!begun_) {
    reset();
  }
  if (position_ == own_.size()) {
    return std::nullopt;
  }
  const auto begin = own_.begin() + static_cast<std::ptrdiff_t>(position_);
  const auto count = std::min(batch_size, own_.size() - position_);
  position_ += count;
  return std::vector<size_t>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

}  // namespace brimful
