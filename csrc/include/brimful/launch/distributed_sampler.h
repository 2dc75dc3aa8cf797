#pragma once
#include <brimful/export.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace brimful {

struct DistributedSamplerOptions {
  bool shuffle = true;
  uint64_t seed = 0;  ///< the same on all ranks
};

/// A sampler for torch::data::make_data_loader that deals the samples to the ranks: in every epoch
/// each sample goes to exactly one rank, so ranks differ by at most one sample (and a rank may have
/// none); BatchSizer's loop needs no more. LibTorch's samplers cannot do that: they give every rank
/// the same number of samples, by drawing some twice or, with allow_duplicates=false, by never
/// drawing the last ones; and a data loader, which owns its sampler, repeats their first order.
/// Each reset(), so each pass of a data loader, begins the next epoch and its order. Copyable; no
/// other thread may use the object meanwhile.
class BRIMFUL_API DistributedSampler {
 public:
  using BatchRequestType = std::vector<size_t>;

  /// @throws c10::ValueError unless 0 <= rank < world_size
  DistributedSampler(size_t size, int rank, int world_size, DistributedSamplerOptions options = {});

  /// The next reset() begins this epoch; call it on all ranks, to go on from a checkpoint.
  void set_epoch(uint64_t epoch) { next_epoch_ = epoch; }
  /// Begins the next epoch, counted from 0; of a data set of `new_size` samples if given.
  void reset(std::optional<size_t> new_size = std::nullopt);
  /// This rank's next at most `batch_size` samples; none at the epoch's end. Begins epoch 0 if there was no reset().
  std::optional<std::vector<size_t>> next(size_t batch_size);

 private:
  size_t size_;
  size_t rank_;
  size_t world_size_;
  DistributedSamplerOptions options_;
  uint64_t next_epoch_ = 0;
  bool begun_ = false;
  std::vector<size_t> own_;
  size_t position_ = 0;
};

}  // namespace brimful
