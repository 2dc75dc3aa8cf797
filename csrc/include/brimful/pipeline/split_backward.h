#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// A stage's backward in one piece (B), or in two: the gradients of the stage's inputs first (I), which the stage
/// before waits for, and those of its parameters whenever there is time (W). Any module can be split: it is the graph
/// that is cut, where a node leads both to an input and to a parameter. Such a node runs in I for the one side and in W
/// for the other; where all that it gives to parameters are vectors (scales, shifts) it runs in I for both.
///
/// Gradients of parameters accumulate through AccumulateGrad, as in Tensor::backward, all of them in W. Hooks of any
/// kind run once. `inputs` are leaves: where a stage begins, its graph ends. The same thread rules as for
/// Tensor::backward: any thread, one at a time for a graph, and without Python's GIL. Nothing waits for a device.
namespace brimful::pipeline {

/// What backward_input() left for later. Moves, and is used up by run(). Dropped, it leaves the parameters as they are.
class BRIMFUL_API WeightWork {
 public:
  WeightWork() noexcept;
  ~WeightWork();
  WeightWork(WeightWork&&) noexcept;
  WeightWork& operator=(WeightWork&&) noexcept;

  /// True if nothing is left to do.
  bool empty() const noexcept;
  /// Accumulates into the parameters' gradients; empty afterwards, if it throws too (parameters that it had reached by
  /// then keep what they were given).
  void run();
  /// Of the gradients that are kept for run(), each storage once. Tensors that the graph has saved are not in it.
  int64_t bytes() const;

 private:
  friend struct InputPass;
  struct Left;
  std::unique_ptr<Left> left_;
};

struct InputBackward {
  /// One for each input: undefined where it needs no gradient, or nothing depends on it.
  std::vector<at::Tensor> input_gradients;
  WeightWork weight_work;
  /// False if all was done in one piece: weight_work is empty then.
  bool split = true;
  /// Why it was not, or was not entirely, split; empty in most cases.
  std::string note;
  /// Activations were computed anew (checkpointing) and will be by WeightWork::run() again: backward_full() would do it
  /// once. Seen only where the backward runs on the calling thread.
  bool recomputed = false;
};

/// The whole backward. Returns the gradients of `inputs`, as InputBackward does, and leaves their `grad` as it was.
/// `output_gradients` is as long as `outputs`, or empty: ones, for scalars. An output without a gradient, or that needs
/// none, takes no part.
/// @throws c10::ValueError if the lengths differ, if an input has a history, or if there are no gradients and an output
/// is no scalar
BRIMFUL_API std::vector<at::Tensor> backward_full(const std::vector<at::Tensor>& outputs,
                                                  const std::vector<at::Tensor>& output_gradients,
                                                  const std::vector<at::Tensor>& inputs);

/// The gradients of `inputs` alone, with the arguments of backward_full(). What the graph has saved and
/// WeightWork::run() does not need is freed node by node. Where no input needs a gradient all is left for later.
/// Falls back to the whole backward, and says so in `note`, for graphs with a compiled backward or a reentrant
/// checkpoint. Functions of the user's own (Python or C++) run once, now; gradients of parameters that come out of them
/// are kept for later.
/// The graph is used up, as by a backward that does not retain it: what else still holds it must not run it again.
/// If it throws, nothing was accumulated and the graph cannot be used again.
/// @throws c10::ValueError as backward_full()
BRIMFUL_API InputBackward backward_input(const std::vector<at::Tensor>& outputs,
                                         const std::vector<at::Tensor>& output_gradients,
                                         const std::vector<at::Tensor>& inputs);

}  // namespace brimful::pipeline
