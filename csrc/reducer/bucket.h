#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/reducer/bucket_plan.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reducer/wire.h"

namespace brimful {

/// A parameter's place in its bucket.
struct Slot {
  at::Tensor view;  ///< of the bucket's buffer, with the parameter's shape and strides; undefined
                    ///< where the bucket is sparse or direct
  int64_t bucket = 0;
  int64_t numel = 0;
};

/// The gradients that travel together. Flat: they move into one persistent buffer, so that draining needs no memory.
/// Direct: one large gradient, reduced where autograd left it. Sparse: one sparse gradient.
struct Bucket {
  /// A gradient that has come and waits for the others of its bucket, see DeferredCopies.
  struct Held {
    int64_t parameter = 0;
    at::Tensor gradient;  ///< what p.grad is
    int64_t bytes = 0;    ///< that it takes besides the bucket
    double scale = 1;
    c10::Stream stream;  ///< in which it came
  };

  at::Tensor flat;       ///< flat: real; gradients and, in the last bucket, the tail
  at::Tensor gradients;  ///< flat: the part of it that holds gradients
  at::Tensor
      own;  ///< sparse: this rank's rows, undefined for none; direct: the gradient, or what stands in for it
  at::Tensor sparse_zero;
  at::Tensor drain;  ///< direct: a row that is sent by a rank which cannot do its part
  bool direct = false;
  std::vector<int64_t> parameters;
  std::unique_ptr<Wire> wire;  ///< what is sent instead, in another dtype
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::optional<c10::Stream>
      stream;           ///< the last one that worked on it in this backward; not on the CPU
  int64_t pending = 0;  ///< gradients that this backward still owes
  std::vector<Held> held;
  bool launched = false;
  std::chrono::steady_clock::time_point launched_at;
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> hooked;  ///< of a communication hook
  at::Tensor hook_result;

  bool sparse() const { return sparse_zero.defined(); }
  /// Makes the current stream wait for whoever worked on the bucket before, in another one: autograd runs each node in
  /// the stream of its forward. Does not synchronise the device.
  void join_current_stream();
};

struct Layout {
  std::vector<Slot> slots;
  std::vector<Bucket> buckets;
};

/// The memory of all flat buckets of a dtype on a device, in one piece: a new plan is carved from the same memory.
class Arenas {
 public:
  using Allocate = std::function<at::Tensor(int64_t numel, const at::TensorOptions& options)>;
  /// `allocate`: zeroed memory; nothing: from torch's allocator.
  explicit Arenas(Allocate allocate = nullptr) : allocate_(std::move(allocate)) {}

  /// Carves the plan's buckets, zeroed, with `tail_numel` elements behind the gradients of the last one. `dense`: without
  /// gaps between the gradients of a bucket, as communication hooks expect; else each is aligned.
  Layout carve(const BucketPlan& plan, int64_t tail_numel,
               const std::vector<at::Tensor>& parameters, bool dense = false);
  int64_t bytes() const;

 private:
  using Kind = std::pair<c10::ScalarType, std::string>;  ///< real dtype, device
  static Kind kind_of(const BucketPlan::Bucket& bucket);
  /// Without the tail, and with the gaps behind its gradients.
  static int64_t numel_of(const BucketPlan::Bucket& bucket,
                          const std::vector<at::Tensor>& parameters);
  /// Zeroed memory of just these sizes.
  void provide(const std::map<Kind, int64_t>& numels);
  Allocate allocate_;
  std::map<Kind, at::Tensor> memory_;
};

/// The gradient is the view, or another tensor over the same place; false where one is undefined.
bool is_alias(const at::Tensor& gradient, const at::Tensor& view);

/// All of a gradient's or buffer's elements as one real row, sharing memory; dense and non-overlapping.
at::Tensor as_row(const at::Tensor& tensor);

/// view = 0; cheap for many small views.
void set_zero(const at::Tensor& view);

/// view = gradient * scale in one pass; same shape, any dtype.
void copy_scaled(const at::Tensor& view, const at::Tensor& gradient, double scale);

/// gradient * scale as a sparse tensor of rows, whatever it was: all ranks of a sparse bucket must send the same kind.
at::Tensor sparse_scaled(const at::Tensor& gradient, double scale);

/// Reads and writes elements of a real floating buffer on the CPU as whole numbers from 0 to 255, which are
/// exact in every dtype; larger sums read as 255.
void write_bytes(const at::Tensor& buffer, int64_t offset, const uint8_t* bytes, int64_t count);
void read_bytes(const at::Tensor& buffer, int64_t offset, uint8_t* bytes, int64_t count);

}  // namespace brimful
