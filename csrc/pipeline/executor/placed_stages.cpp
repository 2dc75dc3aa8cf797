#include "pipeline/executor/placed_stages.h"

#include <brimful/pipeline/schedule_text.h>

#include <algorithm>
#include <utility>

#include "pipeline/transport/local_channel.h"

namespace brimful::pipeline {

void PlacedStages::place(const Schedule& schedule) {
  const bool all_here = !options_.peers;
  TORCH_CHECK_VALUE((!all_here || schedule.stages == std::ssize(stages_)) &&
                        std::ssize(schedule.ranks) == all_ranks(),
                    "the schedule is for another pipeline (", schedule.name,
                    ": stages: ", schedule.stages, ", ranks: ", schedule.ranks.size(),
                    "; pipeline: stages", all_here ? "" : " of this process", ": ", stages_.size(),
                    ", ranks: ", all_ranks(), ")");
  auto placed = pipeline::rank_of_stage(schedule);
  const auto here =
      std::count_if(placed.begin(), placed.end(), [&](int rank) { return is_here(rank); });
  TORCH_CHECK_VALUE(here == std::ssize(stages_),
                    "the schedule gives the ranks of this process another number of stages (",
                    schedule.name, ": ", here, ", pipeline: ", stages_.size(), ")");
  if (placed != rank_of_stage_) {
    rank_of_stage_ = std::move(placed);
    connect();
  }
}

Channel* PlacedStages::connect(int from, int to, int number) {
  if (is_here(from) && is_here(to)) {
    const auto& devices = options_.devices;
    channels_.push_back(std::make_unique<LocalChannel>(
        bells_[to - first_rank()], cancelled_,
        CopyLane::between(devices[from - first_rank()], devices[to - first_rank()])));
  } else if (is_here(from) || is_here(to)) {
    channels_.push_back(options_.peers->channel(from, to, number));
  } else {
    return nullptr;
  }
  return channels_.back().get();
}

void PlacedStages::connect() {
  const auto count = static_cast<int>(rank_of_stage_.size());
  runs_.clear();
  runs_.resize(count);
  channels_.clear();
  size_t next = 0;
  for (int stage = 0; stage < count; ++stage) {
    auto& run = runs_[stage];
    run.index = stage;
    const int rank = rank_of_stage_[stage];
    if (is_here(rank)) {
      run.stage = &stages_[next++];
      run.device = options_.devices[rank - first_rank()];
    }
  }
  for (int stage = 0; stage + 1 < count; ++stage) {
    const int rank = rank_of_stage_[stage];
    const int following = rank_of_stage_[stage + 1];
    auto* const forward = connect(rank, following, 2 * stage);
    auto* const backward = connect(following, rank, 2 * stage + 1);
    runs_[stage].outputs = runs_[stage + 1].inputs = forward;
    runs_[stage].output_gradients = runs_[stage + 1].input_gradients = backward;
  }
}

void PlacedStages::begin(const Schedule& schedule, const StepWork& work, Turns& turns) {
  for (const auto& order : schedule.ranks) {
    for (const auto& action : order) {
      TORCH_CHECK_VALUE(action.microbatch >= 0 && action.microbatch < schedule.microbatches,
                        "the schedule has an action of a microbatch that is not there (action: ",
                        to_string(action), ", microbatches: ", schedule.microbatches, ")");
    }
  }
  for (auto& run : runs_) {
    run.begin(schedule, rank_of_stage_);
    const bool may = run.stage != nullptr && work.loss && !work.rungs.empty();
    run.again.rung = may ? work.rungs.at(run.stage - stages_.data()) : StageRung::none;
    if (is_recomputed(run.again.rung)) {
      turns.expect_backward(run.index);
    }
  }
  for (const auto& channel : channels_) {
    channel->reset(schedule.microbatches, work.rows);
  }
}

void PlacedStages::drop(int rank) {
  for (auto& stage : runs_) {
    if (rank_of_stage_[stage.index] == rank) {
      stage.drop();
    }
  }
}

void PlacedStages::drop_all(int microbatches) {
  for (auto& run : runs_) {
    run.drop();
  }
  for (const auto& channel : channels_) {
    channel->reset(microbatches, 0);
  }
}

void PlacedStages::flush() const {
  for (const auto& channel : channels_) {
    channel->flush();
  }
}

}  // namespace brimful::pipeline
