#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/reducer/bucket_plan.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace brimful {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// A collective under way, in which every rank gives the same number of bytes.
struct Exchange {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> outputs;

  /// Every rank's bytes, by rank, once the work has been waited for.
  std::vector<std::vector<uint8_t>> read() const;
};
Exchange begin_exchange(const Group& group, c10::Device device, const std::vector<uint8_t>& own);

/// Every rank's bytes, by rank; all ranks give the same number. One collective on `device`, waited for by `wait`, if given.
std::vector<std::vector<uint8_t>> exchange_bytes(
    const Group& group, c10::Device device, const std::vector<uint8_t>& own,
    const std::function<void(c10d::Work&)>& wait = nullptr);

/// What must be alike on all ranks.
struct Model {
  const std::vector<at::Tensor>& parameters;
  const std::vector<std::string>& names;
  const std::vector<at::Tensor>& frozen;
  const std::vector<at::Tensor>& buffers;
  const std::string& plan;
};

/// Each rank has devices of its own: they have numbers in their order, as on every other rank.
BucketPlan with_devices_in_order(BucketPlan plan);

/// Checks that all ranks have the same model, before anything else is sent (gloo kills a process whose peer sends another
/// size). Returns the `numbers` of each rank.
/// @throws PlanMismatch on every rank, naming the first parameter or buffer that differs
std::vector<std::array<uint64_t, 4>> require_same_model(const Group& group, c10::Device device,
                                                        const Model& model,
                                                        const std::array<uint64_t, 4>& numbers);

/// Gives every rank the values of rank `source`.
void broadcast_from(int source, const Group& group, const std::vector<at::Tensor>& tensors);

}  // namespace brimful
