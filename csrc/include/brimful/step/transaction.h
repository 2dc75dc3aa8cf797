#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <functional>
#include <vector>

namespace brimful {

/// What a repeated step must find as it was: random number generators and buffers. Parameters are not touched before a
/// step is accepted, and gradients are empty at its start, so neither is copied.
class BRIMFUL_API Transaction {
 public:
  /// Something else to keep, such as Python's `random`.
  struct Keeper {
    std::function<void()> capture;
    std::function<void()> restore;
  };

  /// `devices`: whose default generators are kept, beside the CPU's. The copies of `buffers` are allocated at once, so
  /// that capture() allocates nothing on their device.
  Transaction(std::vector<at::Tensor> buffers, std::vector<c10::Device> devices);
  void add(Keeper keeper);
  /// `buffers()` returns the buffers that a module has: asked at each capture, since a forward may put others in their
  /// place. One that was replaced since gets the value from before.
  void follow(std::function<std::vector<at::Tensor>()> buffers);
  void capture();
  /// Writes buffers back in place, only those that changed; may be called several times after one capture().
  /// Compares their values, and so waits for the device: BatchNorm changes its statistics behind the version counter.
  void restore();
  /// The same between two passes of work of which no graph is left: writes all buffers, and waits for no device.
  void rewind();

 private:
  void hold(std::vector<at::Tensor> buffers);
  void restore_others();
  void restore_replaced();

  std::function<std::vector<at::Tensor>()> current_;  ///< buffers, where a module may have others
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> copies_;
  std::vector<uint32_t> versions_;
  std::vector<c10::Device> devices_;
  std::vector<at::Tensor> generator_states_;
  std::vector<Keeper> keepers_;
};

}  // namespace brimful
