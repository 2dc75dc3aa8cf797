#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/transport/copy_lane.h"

namespace brimful::pipeline {

/// What stages leave for later ones, and the gradients that come back. A stage's forward comes after the forward of those
/// before it, and its backward before theirs: what is asked for is there, or never will be.
class SkipBoard {
 public:
  struct Parcel {
    Message message;
    bool needs_gradient = false;
    int64_t version = -1;  ///< of the tensor when its stage's forward had ended; -1: not known
  };
  void put(const std::string& name, int microbatch, Parcel parcel);
  /// @throws c10::ValueError if there is none
  Parcel take(const std::string& name, int microbatch);
  /// All that has not been popped, by name.
  std::vector<std::pair<std::string, Parcel>> take_all(int microbatch);
  /// Behind the forward of a stage: whoever changes what it has stashed from here on is another stage.
  void end_forward(int microbatch);
  /// @throws c10::ValueError if something remains that has not been popped
  void require_empty(int microbatch);
  void put_gradient(const std::string& name, int microbatch, at::Tensor gradient);
  /// On `device`; undefined if it has not been popped.
  at::Tensor take_gradient(const std::string& name, int microbatch, c10::Device device);
  CopyLanes& lanes() { return lanes_; }
  void clear();

 private:
  using Key = std::pair<int, std::string>;
  std::mutex mutex_;
  std::map<Key, Parcel> parcels_;
  std::map<Key, Message> gradients_;
  CopyLanes lanes_;
};

/// What a stage has stashed and popped in a microbatch.
struct SkipRecord {
  struct Named {
    std::string name;
    at::Tensor tensor;
  };
  std::vector<Named> stashed;  ///< with their graph, that a gradient may come back for
  std::vector<Named> popped;   ///< leaves, that want one
  /// Stashed where nothing was recorded, within a reentrant checkpoint: the backward makes their graph.
  std::vector<std::string> unrecorded;
  std::vector<Named> again;  ///< what a checkpoint that runs once more pops
  bool repeated = false;     ///< the whole forward runs once more in the backward

  /// Of what begins and ends a graph.
  void drop_graph() {
    stashed.clear();
    popped.clear();
  }
};

/// Where stash() and pop() go while this lives on a stage's thread, in a forward and in a backward, which may run parts of
/// the forward once more.
class SkipScope {
 public:
  SkipScope(SkipBoard& board, SkipRecord& record, int microbatch, c10::Device device);
  ~SkipScope();
  SkipScope(const SkipScope&) = delete;
  SkipScope& operator=(const SkipScope&) = delete;

  void stash(const std::string& name, const at::Tensor& tensor);
  at::Tensor pop(const std::string& name);
  /// What the forward has popped of other stages, or a checkpoint of its own.
  /// @throws c10::ValueError if there is none
  at::Tensor pop_again(const std::string& name) const;

 private:
  void stash_again(const std::string& name, const at::Tensor& tensor);

  SkipBoard& board_;
  SkipRecord& record_;
  int microbatch_;
  c10::Device device_;
  bool trains_;  ///< gradients are recorded where it begins
  SkipScope* outer_;
};

/// Where stash() and pop() go while this lives on a stage's thread within its SkipScope, in the second forward of a stage that is
/// recomputed.
class SkipsAgain {
 public:
  SkipsAgain();
  ~SkipsAgain();
  SkipsAgain(const SkipsAgain&) = delete;
  SkipsAgain& operator=(const SkipsAgain&) = delete;

  void stash(const std::string& name, const at::Tensor& tensor);
  at::Tensor pop(const std::string& name);
  /// Those with a graph that the stage has not popped itself, in their order.
  std::vector<at::Tensor> stashed() const;

 private:
  std::vector<SkipRecord::Named> own_;
  SkipsAgain* outer_;
};

/// A tensor of the same values and memory that may be changed in place, as a leaf that needs a gradient may not: the
/// gradient goes to the leaf. Others are returned as they are.
at::Tensor changeable(const at::Tensor& leaf);

}  // namespace brimful::pipeline
