#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace brimful {

/// Copies within a device that are made together: one call for each dtype, where each by itself costs the host more than
/// the device.
class CopyList {
 public:
  /// False if the two are not alike, so that the caller has to make the copy: a single such one would send all others down
  /// a way on which each is made by itself.
  bool add(const at::Tensor& to, const at::Tensor& from);
  /// Makes them, and is empty then. Does not synchronise the device.
  void make();

 private:
  struct Alike {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
  };
  Alike& of(const at::Tensor& to);

  std::vector<Alike> lists_;  ///< each of one dtype on one device
};

}  // namespace brimful
