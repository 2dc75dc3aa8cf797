#pragma once
#include <ATen/core/Tensor.h>

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/transport/peers.h"

namespace brimful::pipeline {

/// Parameters that stages share and have a copy of each, in this process or in others: all get the sum of the copies'
/// gradients.
class TiedWeights {
 public:
  /// Each copy with the name that it shares. Without peers all copies are here, and begin with the values of the first.
  /// @throws c10::ValueError for a parameter that is there twice, copies of different shapes or dtypes, and, without peers,
  /// a name with one copy
  TiedWeights(std::vector<std::pair<std::string, at::Tensor>> own, std::shared_ptr<Peers> peers);

  int64_t size() const { return std::ssize(weights_); }
  /// Takes the memory of what follows, so that nothing of it fails where others wait; drop_room() gives it back.
  /// @throws c10::OutOfMemoryError
  void make_room();
  void drop_room() noexcept;
  /// With peers: who has which, and copies of the lowest rank's values. Called by every rank, after make_room().
  /// @throws c10::ValueError on every rank, for a name that one rank alone has, or of different shapes or dtypes
  void meet();
  /// Called by every rank that has some, after a step that stands and make_room(). Sums are made in the order of the ranks
  /// and copies, and so are equal. `failed`: this rank has no gradients to give; the others are informed.
  /// @throws what failed here; RankFailed if the group broke, or another rank had none to give
  void sum_gradients(std::exception_ptr failed);

 private:
  struct Weight {
    std::vector<at::Tensor> copies;  ///< of this process
    std::vector<int> ranks;          ///< that have some, in order, this one too
    // Room: values, and behind them a mark. `total` is `own` where there are no peers.
    at::Tensor own;
    at::Tensor theirs;
    at::Tensor total;
    std::vector<at::Tensor>
        fresh;  ///< by copy: its gradient, where it has none that can be written to

    const at::Tensor& first() const { return copies[0]; }
    /// All but the mark, in the shape of the parameter.
    at::Tensor values_of(const at::Tensor& room) const;
    at::Tensor mark_of(const at::Tensor& room) const { return room[first().numel()]; }
    void gather() const;
    void scatter();
  };
  void fetch(Weight& weight);
  void exchange(Weight& weight);

  std::map<std::string, Weight> weights_;
  std::shared_ptr<Peers> peers_;
};

}  // namespace brimful::pipeline
