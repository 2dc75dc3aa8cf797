#pragma once
#include <string>
#include <vector>

#include "pipeline/call.h"
#include "pipeline/executor/executor.h"

namespace brimful::pipeline {

/// Which of this process's stages run their forward again in backward. Begins with those that the options name.
class Recomputing {
 public:
  /// Both outlive it. `numbers`: of this process's stages, among `stages` of all processes.
  /// @throws c10::ValueError if the options name a stage that is not there
  Recomputing(const PipelineOptions& options, const Executor& executor,
              const std::vector<int>& numbers, int stages);

  /// By this process's stages.
  const std::vector<Recompute>& all() const { return all_; }
  /// More stages recomputed may save the attempt, which ran out of memory.
  bool may_help(const Call& call, const StepResult& result) const {
    return !next(call, result).empty();
  }
  /// A stage that is recomputed could not be, which is all that failed the attempt.
  static bool is_refused(const StepResult& result);
  /// Such stages never are again. Returns whether there are any.
  bool drop_refused(const Call& call, const StepResult& result);
  /// Begins with those that may_help(), and returns what they are called; empty: there are none.
  std::string add(const Call& call, const StepResult& result);
  void note_stood();
  /// Their numbers, and what they are called.
  std::vector<int> numbers(const Schedule& order) const;
  std::vector<std::string> names(const Schedule& order) const;

 private:
  std::vector<size_t> next(const Call& call, const StepResult& result) const;

  const PipelineOptions& options_;
  const Executor& executor_;
  std::vector<Recompute> all_;
  std::vector<bool> refused_;
};

}  // namespace brimful::pipeline
