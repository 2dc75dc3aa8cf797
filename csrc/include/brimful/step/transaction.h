#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/forward_state.h>

#include <functional>
#include <memory>
#include <vector>

namespace brimful {

/// What a repeated step must find as it was: random number generators and what a forward may change of modules. Parameters
/// are not touched before a step is accepted, and gradients are empty at its start, so neither is copied.
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
  /// Whose buffers are kept beside those of the constructor: asked at each capture, since a forward may change which there
  /// are.
  void follow(std::shared_ptr<TensorNames> names);
  /// The same of modules of torch::nn.
  void follow(std::function<std::vector<at::Tensor>()> buffers);
  void capture();
  /// May be called several times after one capture(); see ForwardState::restore().
  void restore();
  /// The same between two passes of work of which no graph is left: waits for no device.
  void rewind();

 private:
  void restore_others();

  std::vector<at::Tensor> buffers_;
  ForwardState state_;
  std::vector<c10::Device> devices_;
  std::vector<at::Tensor> generator_states_;
  std::vector<Keeper> keepers_;
};

}  // namespace brimful
