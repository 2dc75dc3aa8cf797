#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace brimful {

struct ReducerOptions {
  std::optional<double> bucket_cap_mb;  ///< of a bucket, in MiB; nothing: 25, until it is tuned
  double first_bucket_cap_mb = 1;
  /// In place of those two, in MiB: caps of the first, second, ... bucket (of each dtype and device), the last one for
  /// all that follow.
  std::vector<double> bucket_cap_mb_list;
  /// "auto": in the order of the first backward's gradients, sizes tuned in the first steps where no cap is given;
  /// "ordered": the order alone; "registration": the reverse of registration, never changed; else a plan that plan()
  /// gave, never changed.
  std::string plan = "auto";
  /// Gradients travel as this dtype (float64, float32, float16 or bfloat16): bfloat16 halves the bytes of float32, float32
  /// sums bfloat16 exactly.
  std::optional<c10::ScalarType> wire_dtype;
  bool error_feedback = false;  ///< what rounding to wire_dtype took is added to the next gradient
  /// Plain loop: gradients are divided by this before the sum and by world size / this after it; nothing: world size.
  std::optional<double> gradient_predivide_factor;
  bool broadcast_buffers =
      true;  ///< buffers agree after every step: those of the lowest rank that had data
  bool synchronise_at_start = true;  ///< give all ranks the parameters and buffers of rank 0
  std::vector<at::Tensor> frozen;    ///< parameters that need no gradient: equal at the start too
  std::vector<std::string> names;    ///< of the parameters, for messages
  std::vector<bool> sparse;          ///< by parameter: its gradient will be a sparse tensor
  /// Plain loop: the step's backward is that of a forward between prepare_forward() and forward_done(), and any other one
  /// is this rank's own. False: every backward that reaches a parameter is a step's.
  bool forwards_announced = false;
  /// By parameter: forward changes it, on each rank in its own way (an Embedding with max_norm), which is no update.
  std::vector<bool> renormalised;
  /// Ranks whose parameters were not updated alike raise PlanMismatch. False, on any rank: they differ on purpose.
  bool check_updates = true;
  /// Control records go between the hosts, over a gloo group of their own that all reducers of a process group share, and not
  /// in the last bucket: a step then waits for no device. Only if all ranks want it and can connect: else the log says why not.
  /// None: on devices whose collectives end in streams (NCCL).
  std::optional<bool> between_hosts;
};

}  // namespace brimful
