#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

#include "reducer/agree.h"

namespace brimful {

/// Connects the hosts of a process group's ranks, by gloo over the network device that the group itself uses, if it does.
class HostConnector {
 public:
  /// What this rank needs of its own.
  /// @throws std::exception if it lacks any: gloo, a store, a network device
  HostConnector(const Group& group, c10::intrusive_ptr<c10d::Store> store);
  /// A collective. `key`: in the store, the same on all ranks, and never used before.
  /// @throws std::exception if a rank does not come within half a minute
  c10::intrusive_ptr<c10d::Backend> connect(const std::string& key) const;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_size_;
  c10::intrusive_ptr<c10d::Backend::Options> options_;  ///< gloo's
};

}  // namespace brimful
