#pragma once
#include <brimful/pipeline/schedule.h>

namespace brimful::pipeline {

/// How long actions take, in any unit. Each list has a value a stage, or one for all.
struct Costs {
  std::vector<double> forward{1};
  std::vector<double> backward_input{1};
  std::vector<double> backward_weight{1};
  std::vector<double> backward;  ///< of a full B; empty: backward_input plus backward_weight
  double hop =
      0;  ///< from a message's send to its arrival on another rank; ranks compute meanwhile
  std::vector<double> activation{1};  ///< what a forward leaves until its backward, such as bytes
  double input_share = 0;             ///< the share of it that I frees; W frees the rest
  /// Ranks wait in receives. False: receives are posted, and what uses their message waits for it.
  bool receives_wait = true;
};

struct TimedAction {
  Action action;
  double start = 0;
  double end = 0;  ///< of a receive in which a rank waits: when its message is there
};

/// A schedule with its times.
struct Timeline {
  std::string name;
  int stages = 0;
  int microbatches = 0;
  std::vector<std::vector<TimedAction>> ranks;
  double makespan = 0;
  /// The longest time from a rank's first compute action to the end of its last: the time of a step where ranks begin
  /// the next without waiting for each other. Zero-bubble schedules are judged by it (Qi et al., 2023, section 4).
  double period = 0;
  std::vector<double> busy;        ///< time in compute actions, by rank
  std::vector<double> peak_live;   ///< most microbatches held at once, by stage
  std::vector<double> peak_bytes;  ///< most of Costs::activation held at once, by rank

  /// The share of `rank`'s time in which it computes nothing: 1 - busy / makespan.
  double bubble(int rank) const { return makespan > 0 ? 1 - busy[rank] / makespan : 0; }
  /// The same of all ranks together.
  BRIMFUL_API double bubble() const;
};

/// The times at which ranks do their actions as early as possible: in order, sends without waiting, receives as `costs`
/// say. Without communication in the schedule, an action waits for the message that it would receive.
/// @throws c10::ValueError if the schedule is not valid (see check(); channels by_message), or a list of
///         costs has another length than 1 or the number of stages, or holds a negative value or none at all
BRIMFUL_API Timeline simulate(const Schedule& schedule, const Costs& costs = {});

}  // namespace brimful::pipeline
