#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/reducer/bucket_plan.h>

#include <optional>
#include <string>
#include <vector>

#include "reducer/bucket.h"
#include "reducer/gradient_view.h"
#include "reducer/tail.h"

namespace brimful {

/// The parameters, and what the plan in use makes of them: slots, buckets and their memory.
struct BucketSet {
  std::vector<at::Tensor> parameters;
  std::vector<ParameterInfo> infos;
  std::vector<std::string> names;
  PlanOptions plan_options;
  BucketPlan plan;
  Arenas arenas;
  std::vector<Slot> slots;
  std::vector<GradientView> views;  ///< by parameter: what p.grad is
  std::vector<Bucket> buckets;
  std::optional<Tail> tail;
  std::optional<c10::ScalarType> wire_dtype;
  bool error_feedback = false;

  int64_t last() const { return static_cast<int64_t>(buckets.size()) - 1; }
  std::string name_of(int64_t parameter) const;
  /// The first of its parameters that is one of `others`.
  std::optional<int64_t> shared_with(const std::vector<at::Tensor>& others) const;
  /// @throws PlanMismatch if a parameter has another size or dtype than at construction
  void require_unchanged(int64_t parameter, const at::Tensor& gradient) const;
  /// The parameter's place is about to get other values: a gradient that the program kept gets memory of its own.
  void let_go_of(size_t parameter);
  /// Of a bucket, where what is there is of an earlier step.
  void let_go_of_earlier(int64_t index);
  /// Takes up a plan. `dense`: as in Arenas::carve. `encodes`: gradients travel in the reduction dtype.
  void lay_out(BucketPlan new_plan, bool dense, bool encodes);
  /// What the bucket's gradients are on this rank: a row; undefined if sparse.
  at::Tensor row_of(const Bucket& bucket) const;
  /// What goes to the process group.
  at::Tensor payload(const Bucket& bucket) const;
  /// Of this rank, by sparse bucket.
  std::vector<int64_t> own_rows() const;
};

}  // namespace brimful
