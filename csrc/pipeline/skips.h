#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/copy_lane.h"

namespace brimful::pipeline {

/// What stages leave for later ones, and the gradients that come back. A stage's forward comes after the forward of those
/// before it, and its backward before theirs: what is asked for is there, or never will be.
class SkipBoard {
 public:
  struct Parcel {
    Message message;
    bool needs_gradient = false;
  };
  void put(const std::string& name, int microbatch, Parcel parcel);
  /// @throws c10::ValueError if there is none
  Parcel take(const std::string& name, int microbatch);
  /// All that nobody has popped, by name.
  std::vector<std::pair<std::string, Parcel>> take_all(int microbatch);
  void put_gradient(const std::string& name, int microbatch, at::Tensor gradient);
  /// On `device`; undefined if nobody has popped it.
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

/// What a stage's forward stashes and pops in a microbatch, while this lives on its thread.
class SkipScope {
 public:
  struct Named {
    std::string name;
    at::Tensor tensor;  ///< with its graph
  };
  SkipScope(SkipBoard& board, int microbatch, c10::Device device);
  ~SkipScope();
  SkipScope(const SkipScope&) = delete;
  SkipScope& operator=(const SkipScope&) = delete;

  void stash(const std::string& name, const at::Tensor& tensor);
  at::Tensor pop(const std::string& name);

  std::vector<Named> stashed;  ///< that a gradient may come back for
  std::vector<Named> popped;   ///< that want one

 private:
  SkipBoard& board_;
  int microbatch_;
  c10::Device device_;
  SkipScope* outer_;
};

}  // namespace brimful::pipeline
