#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace brimful::pipeline {

/// A message on its way, and its bytes, which have to live until it has arrived.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor bytes;
};

/// Leaves none. Where one fails the ranks cannot agree on a verdict, and say why.
void wait_for(std::vector<Transfer>& sends) noexcept;

}  // namespace brimful::pipeline
