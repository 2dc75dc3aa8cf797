// Sparse gradients. How many rows a rank has rides beside its control record; the rows themselves follow in one
// all_gather a bucket once all ranks have accepted the step, so that a rank which drains sends nothing and needs no memory.
// Not the group's all_reduce of sparse tensors: NCCL has none, and two of gloo's threads write one std::string without a
// lock (ProcessGroupGloo::runLoop), which corrupts the heap when a sparse one is in flight beside another collective.
#include "reducer/rows.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/categories.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>

#include "base/units.h"
#include "reducer/group_calls.h"

namespace brimful {
namespace {
constexpr int64_t kAlignmentBytes = 16;  // the largest element (complex double)

int64_t aligned(int64_t bytes) {
  return round_up(bytes, kAlignmentBytes);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.resolve_conj().contiguous().view({-1}).view(at::kByte);
}

/// Indices, then values, of up to `rows` rows, as bytes.
struct Packing {
  Packing(const at::Tensor& like, int64_t rows)
      : options(like._values().options()),
        row_shape(like._values().sizes().slice(1).vec()),
        index_bytes(aligned(rows * static_cast<int64_t>(sizeof(int64_t)))) {
    row_bytes =
        c10::multiply_integers(row_shape) * static_cast<int64_t>(like._values().element_size());
    bytes = index_bytes + aligned(rows * row_bytes);
  }
  at::Tensor pack(const at::Tensor& rows) const {
    auto packed = at::zeros({bytes}, options.dtype(at::kByte));
    if (rows.defined() && rows._nnz() > 0) {
      const auto indices = bytes_of(rows._indices());
      const auto values = bytes_of(rows._values());
      packed.narrow(0, 0, indices.numel()).copy_(indices);
      packed.narrow(0, index_bytes, values.numel()).copy_(values);
    }
    return packed;
  }
  at::Tensor indices(const at::Tensor& packed, int64_t rows) const {
    return packed.narrow(0, 0, rows * static_cast<int64_t>(sizeof(int64_t)))
        .view(at::kLong)
        .view({1, rows});
  }
  at::Tensor values(const at::Tensor& packed, int64_t rows) const {
    std::vector<int64_t> shape{rows};
    shape.insert(shape.end(), row_shape.begin(), row_shape.end());
    return packed.narrow(0, index_bytes, rows * row_bytes)
        .view(c10::typeMetaToScalarType(options.dtype()))
        .view(shape);
  }

  at::TensorOptions options;
  std::vector<int64_t> row_shape;
  int64_t index_bytes;
  int64_t row_bytes = 0;
  int64_t bytes = 0;
};

struct Gathering {
  Packing packing;
  at::Tensor sent;
  std::vector<at::Tensor> received;  ///< by rank
  c10::intrusive_ptr<c10d::Work> work;
};

/// The sum over the ranks, in their order: equal to the bit on all of them.
at::Tensor sum_of(const Gathering& gathering, const std::vector<int64_t>& rows_by_rank,
                  const at::Tensor& like) {
  const auto& packing = gathering.packing;
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
  for (size_t rank = 0; rank < rows_by_rank.size(); ++rank) {
    indices.push_back(packing.indices(gathering.received[rank], rows_by_rank[rank]));
    values.push_back(packing.values(gathering.received[rank], rows_by_rank[rank]));
  }
  return at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), at::cat(values), like.sizes(),
                                       like.options())
      .coalesce();
}
}  // namespace

void exchange_rows(GroupLink& link, BucketSet& layout, int64_t step) {
  std::vector<Bucket*> sparse;
  for (auto& bucket : layout.buckets) {
    if (bucket.sparse()) {
      sparse.push_back(&bucket);
    }
  }
  if (sparse.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  std::optional<memory::UnlimitedEverywhere> also_the_groups_threads;
  std::vector<Gathering> gatherings;
  const auto rows_of = [&](size_t i) { return layout.tail->head().rows(static_cast<int64_t>(i)); };
  link.begin_wait();
  try {
    for (size_t i = 0; i < sparse.size(); ++i) {
      auto& bucket = *sparse[i];
      const auto rows = rows_of(i);
      const auto most = *std::max_element(rows.begin(), rows.end());
      auto& gathering =
          gatherings.emplace_back(Gathering{Packing(bucket.sparse_zero, most), {}, {}, {}});
      if (most == 0 || link.world_size == 1) {
        continue;
      }
      if (!also_the_groups_threads) {  // until the last all_gather has ended
        also_the_groups_threads.emplace();
      }
      link.require(bucket.device);
      const memory::CategoryScope messages(memory::Category::communication);
      gathering.sent = gathering.packing.pack(bucket.own);
      gathering.received =
          at::empty({link.world_size, gathering.sent.numel()}, gathering.sent.options()).unbind();
      std::vector<at::Tensor> inputs{gathering.sent};
      std::vector<std::vector<at::Tensor>> outputs{gathering.received};
      const WithoutPythonObjects without;
      gathering.work = link.group->allgather(outputs, inputs);
      link.count(&Reducer::Counters::launches);
    }
    for (size_t i = 0; i < sparse.size(); ++i) {
      auto& bucket = *sparse[i];
      if (gatherings[i].work) {
        link.wait_for(*gatherings[i].work, bucket.device);
        bucket.own = sum_of(gatherings[i], rows_of(i), bucket.sparse_zero);
      } else if (!bucket.own.defined()) {
        bucket.own = bucket.sparse_zero.clone();
      }
    }
  } catch (const std::exception&) {
    link.fail(std::current_exception());
    auto failure = failure_of(link.error());
    failure.rank = link.rank;
    failure.step = step;
    link.board->try_post(failure);
    link.throw_broken(step, "the rows of sparse gradients", failure.text);
  }
}

}  // namespace brimful
