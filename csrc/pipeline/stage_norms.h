#pragma once
#include <brimful/sizer/batch_norm.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace brimful::pipeline {

/// A stage's BatchNorms and where they are in the step.
struct StageNorms {
  StageNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules)
      : norms(policy, std::move(modules)) {}
  BatchNorms norms;
  int64_t next = 0;
  int64_t pieces = 0;  ///< 0: not in a step
};

/// What BatchNorms have changed for a step's microbatches is undone at its end.
class NormsScope {
 public:
  NormsScope(const std::vector<std::shared_ptr<StageNorms>>& norms, int64_t pieces)
      : norms_(norms) {
    for (const auto& each : norms_) {
      each->next = 0;
      each->pieces = pieces;
    }
  }
  ~NormsScope() {
    for (const auto& each : norms_) {
      if (each->pieces > 0) {
        each->pieces = 0;
        each->norms.after_step();
      }
    }
  }
  NormsScope(const NormsScope&) = delete;
  NormsScope& operator=(const NormsScope&) = delete;

 private:
  const std::vector<std::shared_ptr<StageNorms>>& norms_;
};

}  // namespace brimful::pipeline
