#pragma once
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <cstdint>
#include <memory>
#include <optional>
#include "probes/index_check.h"

namespace brimful::probes {

/// What is left of an operator's indices to look at later. Never waits for a device, and can be destroyed when it is dead.
class KeptIndex {
 public:
  static constexpr int64_t kMostCopied = 2048;

  /// `place` counts the operators: CUDA's copies share 256 places.
  KeptIndex(const IndexUse& use, uint64_t place);

  /// Nothing if the values are gone, or never came.
  std::optional<IndexRange> range() const;
  int64_t first() const { return first_; }
  int64_t last() const { return last_; }

 private:
  void copy_from_cuda(const at::Tensor& index, uint64_t place);

  int64_t first_;
  int64_t last_;
  std::optional<int64_t> ignored_;
  std::optional<IndexRange> range_;                                 // a short one on the CPU
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> tensor_;  // a long one on the CPU
  const int64_t* pinned_ = nullptr;                                 // a short one on CUDA
  int64_t count_ = 0;
};

}  // namespace brimful::probes
