#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/reducer/bucket_plan.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <vector>

namespace brimful {

/// A parameter's place in its bucket.
struct Slot {
  at::Tensor
      view;  ///< of the bucket's buffer, with the parameter's shape and strides; undefined if sparse
  int64_t bucket = 0;
};

/// One flat buffer that all gradients of a bucket move into; persistent, so that draining needs no memory.
struct Bucket {
  at::Tensor flat;       ///< real; undefined if sparse
  at::Tensor gradients;  ///< the part of `flat` that holds gradients
  at::Tensor sparse;     ///< what a sparse bucket sends: the gradient, or nothing
  at::Tensor sparse_zero;
  std::vector<int64_t> parameters;
  int64_t pending = 0;  ///< gradients that this backward still owes
  bool left = false;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Allocates the bucket's buffer, with room for `tail_numel` elements behind the gradients, and fills in its slots.
Bucket make_bucket(const BucketPlan::Bucket& plan, int64_t index, int64_t tail_numel,
                   const std::vector<at::Tensor>& parameters, std::vector<Slot>& slots);

/// view = gradient * scale in one pass; same shape, any dtype.
void copy_scaled(const at::Tensor& view, const at::Tensor& gradient, double scale);

/// gradient * scale as a sparse tensor of rows, whatever it was: all ranks of a sparse bucket must send the same kind.
at::Tensor sparse_scaled(const at::Tensor& gradient, double scale);

/// Reads and writes elements of a real floating buffer on the CPU as whole numbers from 0 to 255, which are
/// exact in every dtype; larger sums read as 255.
void write_bytes(const at::Tensor& buffer, int64_t offset, const uint8_t* bytes, int64_t count);
void read_bytes(const at::Tensor& buffer, int64_t offset, uint8_t* bytes, int64_t count);

}  // namespace brimful
