#pragma once
#include <brimful/step/outcome.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/call.h"
#include "pipeline/executor/stage_rung.h"
#include "pipeline/executor/step_result.h"
#include "step/retry_policy.h"

namespace brimful::pipeline {

/// What this process's stages give up for memory. Begins with those recomputed that the options name. Where memory runs out,
/// stages of that device take the next rung: the one that holds most is recomputed, then all are, then all are offloaded.
class Recomputing {
 public:
  /// A stage of this process.
  struct Own {
    int number;  ///< among those of all processes
    c10::Device device;
    std::string name;  ///< with its number, for texts
  };
  /// `options` and `policy` outlive it. `stages`: of all processes.
  /// @throws c10::ValueError if the options name a stage that is not there
  Recomputing(const PipelineOptions& options, const RetryPolicy& policy, std::vector<Own> own,
              size_t stages);

  /// By this process's stages.
  const std::vector<StageRung>& all() const { return all_; }
  /// Of each device the rung that was begun last ends if there is more room than when it was begun. Before a call that
  /// `trains`, when its policy has measured the room; nothing before another one.
  void come_back(bool trains);
  /// Another rung may save the attempt, which ran out of memory.
  bool may_help(const Call& call, const StepResult& result) const {
    return !next(call, result).stages.empty();
  }
  /// A stage that is recomputed could not be, which is all that failed the attempt.
  static bool is_refused(const StepResult& result);
  /// Such stages never are again. Returns whether there are any.
  bool drop_refused(const StepResult& result);
  /// Takes the rung that may_help(), and returns what it is called; empty: there is none.
  std::string add(const Call& call, const StepResult& result);
  void note_stood();
  /// Of the stage of this number; none of another process's.
  StageRung of(int stage) const;
  void mark(std::vector<StageNote>& notes) const;
  /// What those are called that are on one.
  StepRungs named() const;

 private:
  struct Rung {
    StageRung rung = StageRung::none;
    std::vector<size_t> stages;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
  };
  struct Begun {
    c10::Device device;
    double room;  ///< bytes
    std::vector<std::pair<size_t, StageRung>> before;
  };
  Rung next(const Call& call, const StepResult& result) const;
  double room(c10::Device device) const;
  bool can_offload(c10::Device device) const;
  std::string names_of(const std::vector<size_t>& stages) const;

  const PipelineOptions& options_;
  const RetryPolicy& policy_;
  std::vector<Own> own_;
  std::vector<StageRung> all_;
  std::vector<bool> refused_;  ///< to be recomputed
  std::vector<Begun> begun_;
  mutable std::optional<bool> can_offload_;
};

/// `numbers` and `devices`: of these stages of this process.
std::vector<Recomputing::Own> own_stages(const std::vector<Stage>& stages,
                                         const std::vector<int>& numbers,
                                         const std::vector<c10::Device>& devices);

}  // namespace brimful::pipeline
