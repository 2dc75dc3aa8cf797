#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace brimful {

/// With what a message calls it, such as batch['x'].
using NamedTensor = std::pair<std::string, at::Tensor>;

/// Tensors of the caller's that work may change in place, as it may in a plain loop. Work that is repeated must find them
/// as they were. Changes are found by version counters, which views share; copies are kept only of tensors that were
/// seen to change before, so that no step holds a batch twice that it does not change. Not thread-safe.
class BRIMFUL_API KeptBatch {
 public:
  enum class Copies : uint8_t {
    known,  ///< of what work was seen to change
    all  ///< of each tensor; restore() then also finds what no version counter shows, and waits for the device
  };

  /// Before the work. Copies are made beyond the memory limit.
  void begin(std::vector<NamedTensor> tensors, Copies copies = Copies::known);
  /// Before the work is repeated, and after it where nothing of it shall stay; may be called several times.
  /// @throws c10::ValueError if a tensor was changed of which there is no copy
  void restore();
  /// After the work: learns what it changed, and lets the copies go.
  void end();
  std::vector<at::Tensor> copies() const;
  /// `other`, restored, had a part of this batch: what its work changed is copied from now on.
  void learn(const KeptBatch& other);

 private:
  struct Entry {
    NamedTensor named;
    at::Tensor copy;  ///< undefined: none
    uint32_t version = 0;
    bool has_graph = false;  ///< the caller's own, before the work
    bool changed = false;    ///< in some attempt
  };
  bool is_known(size_t position) const;
  void copy_known();
  void look();
  void look_closely();

  std::vector<Entry> entries_;
  std::vector<bool> changing_;  ///< by position in the batch
  Copies copies_ = Copies::known;
};

}  // namespace brimful
