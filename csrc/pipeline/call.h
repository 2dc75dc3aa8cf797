#pragma once
#include <brimful/pipeline/pipeline.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/step.h>

#include <algorithm>
#include <atomic>

#include "step/retry.h"

namespace brimful::pipeline {

/// A stage's BatchNorms and where they are in the step.
struct StageNorms {
  StageNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules)
      : norms(policy, std::move(modules)) {}
  BatchNorms norms;
  int64_t next = 0;
  int64_t pieces = 0;  ///< 0: not in a step
};

/// What progress() says between calls.
inline constexpr const char* kIdle = "no call is under way";

/// Ends what a call says that it is doing.
class Doing {
 public:
  Doing(std::atomic<const char*>& doing, std::atomic<bool>& cancelled) : doing_(doing) {
    cancelled = false;
    doing_ = "a call begins";
  }
  ~Doing() { doing_ = kIdle; }
  Doing(const Doing&) = delete;
  Doing& operator=(const Doing&) = delete;

 private:
  std::atomic<const char*>& doing_;
};

/// Each once.
std::vector<c10::Device> distinct(const std::vector<c10::Device>& devices);

/// Parameters that need a gradient, each once.
std::vector<at::Tensor> trained_of(const std::vector<Stage>& stages);

/// What the ranks of this pipeline have in common.
struct Agreement {
  bool made = false;      ///< their set-ups were compared, and are alike
  bool may_split = true;  ///< all ranks
  bool any_tied = false;  ///< a rank has a tied weight
  bool broken = false;    ///< of the last call: a group, on some rank
  int64_t progress = 0;   ///< steps of the parameters, when the reducers regrouped
};

/// One call of step() or forward(), over all its attempts.
struct Call {
  int64_t rows = 0;
  const PipelineWork& work;
  StepGroup group;  ///< the replicas' reducers, and parameters that are in none
  Retry retry;      ///< its plan is the attempt's
  bool trains = true;
  std::exception_ptr refused{};   ///< what went wrong before the first action
  bool failed_elsewhere = false;  ///< on another rank, which says so
  bool captured = false;          ///< what an attempt changes can be restored
  std::exception_ptr lost{};      ///< nothing can be put back: why not
  bool runs = true;   ///< false: all ranks of this pipeline know of it, and none waits for messages
  double ref = 1;     ///< losses' weights are divided by it on all replicas
  uint32_t mark = 0;  ///< of what the replicas must have alike
  std::vector<int64_t> split{};  ///< of a short batch the last ones are empty
  Schedule order{};
  bool as_it_was = false;  ///< of the last attempt, on this rank: it may fit so

  int64_t microbatches() const { return retry.plan().pieces; }
  /// Microbatches that have rows.
  int64_t filled() const { return std::min(rows, microbatches()); }
};

}  // namespace brimful::pipeline
