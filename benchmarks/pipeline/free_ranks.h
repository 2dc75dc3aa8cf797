#pragma once
// The actions of a schedule's ranks, each in its order, without messages: no rank waits for another.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/pipeline/schedule.h>
#include <brimful/pipeline/simulate.h>
#include <brimful/pipeline/split_backward.h>
#include <brimful/pipeline/stage.h>
#include <c10/core/AutogradState.h>

#include <array>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

namespace bench {

/// How long a stage's actions took.
struct Taken {
  std::array<double, 4> seconds{};  ///< by ActionKind
  std::array<int, 4> count{};

  double mean(brimful::pipeline::ActionKind kind) const {
    const auto at = static_cast<size_t>(kind);
    return count[at] == 0 ? 0 : seconds[at] / count[at];
  }
};

/// What one microbatch has left in one stage.
struct Left {
  at::Tensor input;
  at::Tensor output;
  brimful::pipeline::WeightWork work;
};

inline void act(const brimful::pipeline::Action& action, const brimful::pipeline::Stage& stage,
                Left& left) {
  using brimful::pipeline::ActionKind;
  switch (action.kind) {
    case ActionKind::forward:
      left.input = at::zeros({1, 1}).set_requires_grad(action.stage > 0);
      left.output = stage.forward(brimful::pipeline::value_of(left.input)).tensors.at(0);
      return;
    case ActionKind::backward:
      brimful::pipeline::backward_full({left.output}, {at::ones_like(left.output)}, {left.input});
      left = {};
      return;
    case ActionKind::backward_input:
      left.work = brimful::pipeline::backward_input({left.output}, {at::ones_like(left.output)},
                                                    {left.input})
                      .weight_work;
      left.output.reset();
      return;
    case ActionKind::backward_weight:
      left.work.run();
      left = {};
      return;
    default:
      return;
  }
}

/// Runs so many microbatches from the first and from the last on, as a schedule may do other actions for these, with a
/// thread for each rank. Returns what was taken, by stage.
inline std::vector<Taken> run_free(const brimful::pipeline::Schedule& schedule,
                                   const std::vector<brimful::pipeline::Stage>& stages, int most,
                                   bool trains) {
  const auto is_run = [&](const brimful::pipeline::Action& action) {
    const bool is_near =
        action.microbatch < most || action.microbatch >= schedule.microbatches - most;
    return is_near && brimful::pipeline::is_compute(action.kind);
  };
  std::vector<Taken> taken(stages.size());  // a stage is one rank's
  std::vector<std::thread> ranks;
  for (const auto& order : schedule.ranks) {
    ranks.emplace_back([&] {
      at::set_num_threads(1);
      c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
      const at::AutoGradMode mode(trains);
      std::map<std::pair<int, int>, Left> left;
      for (const auto& action : order) {
        if (!is_run(action)) {
          continue;
        }
        const auto began = std::chrono::steady_clock::now();
        act(action, stages[action.stage], left[{action.stage, action.microbatch}]);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        auto& of_stage = taken[action.stage];
        of_stage.seconds[static_cast<size_t>(action.kind)] += took.count();
        ++of_stage.count[static_cast<size_t>(action.kind)];
      }
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  return taken;
}

}  // namespace bench
