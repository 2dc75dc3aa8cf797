#pragma once
#include <brimful/pipeline/schedule.h>
#include <brimful/pipeline/stage.h>
#include <brimful/step/participant.h>

#include <memory>
#include <mutex>
#include <vector>

namespace brimful::pipeline {

/// The reducers of this process's stages in the actions of a step: the buckets of each may be launched in the last
/// action that gives its parameters gradients, and those that it does not fill right after it, so that all but the last bucket
/// travel while the other stages still work. The order is the same on all replicas: buckets of the last stage first.
class Replicas {
 public:
  /// `numbers`: of the stages in the whole pipeline.
  /// @throws c10::ValueError if a stage has parameters to train and none of them is reduced, or a reducer has parameters
  /// of no stage
  Replicas(const std::vector<std::shared_ptr<Participant>>& participants,
           const std::vector<Stage>& stages, const std::vector<int>& numbers);

  bool empty() const { return reducers_.empty(); }
  int world_size() const { return empty() ? 1 : reducers_[0].participant->world_size(); }
  /// A group that they are in broke.
  bool is_broken() const;
  /// In launch order.
  std::vector<std::shared_ptr<Participant>> participants() const;

  /// Before the actions of an attempt.
  void begin(const Schedule& schedule);
  // Before and after an action that may give parameters gradients, by the stage's thread.
  void before(const Action& action);
  void after(const Action& action);

 private:
  struct Reducer {
    std::shared_ptr<Participant> participant;
    std::vector<int> stages;  ///< whose parameters it has, in order
    Action
        last;  ///< stage -1: those stages have several threads, and buckets are launched at the step's end
    bool has(int stage) const;
  };
  std::vector<Reducer> reducers_;
  std::mutex mutex_;
  size_t left_ = 0;            ///< reducers whose early buckets are all launched
  std::vector<char> is_over_;  ///< by reducer: its last action has ended
};

}  // namespace brimful::pipeline
