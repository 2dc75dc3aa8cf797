// What the pipeline's benchmarks measure in C++; prints one JSON object a line.
//   brimful_bench_pipeline actions STEPS                    microseconds of a step of two Linear(64, 64) stages
//   brimful_bench_pipeline sleep SCHEDULE RANKS STAGES_PER_RANK MICROBATCHES EQUAL SECONDS
//   brimful_bench_pipeline matmul SIZE MICROBATCHES ROUNDS  two stages, two free threads, and one thread
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <brimful/memory/stats.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>
#include <brimful/pipeline/simulate.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "free_ranks.h"
#include "sleep_stage.h"

namespace {
using namespace brimful;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Stage;

double wall() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Of all threads of the process.
double cpu() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Linear {
  explicit Linear(int64_t size)
      : weight((at::randn({size, size}) / 8).set_requires_grad(true)),
        bias(at::zeros({size}).set_requires_grad(true)) {}
  at::Tensor operator()(const at::Tensor& x) const { return at::linear(x, weight, bias); }
  Stage stage() const { return pipeline::make_stage(*this, {weight, bias}); }
  void zero_grad() const {
    weight.mutable_grad().reset();
    bias.mutable_grad().reset();
  }
  at::Tensor weight;
  at::Tensor bias;
};

at::Tensor mse(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

/// Steps with and without a trace in turn: two processes differ by more than a trace costs.
int actions(int steps) {
  constexpr int64_t kSize = 64;
  constexpr int64_t kMicrobatches = 32;
  const Linear first(kSize);
  const Linear second(kSize);
  PipelineOptions options;
  options.microbatches = kMicrobatches;
  options.threads_per_rank = 1;
  Pipeline traced({first.stage(), second.stage()}, options);
  options.trace = false;
  Pipeline untraced({first.stage(), second.stage()}, options);
  const auto x = at::randn({kMicrobatches, kSize});
  const auto y = at::randn({kMicrobatches, kSize});
  for (int step = -20; step < steps; ++step) {
    for (const bool trace : {step % 2 == 0, step % 2 != 0}) {
      const double began[] = {wall(), cpu()};
      (trace ? traced : untraced).step(x, y, mse);
      if (step >= 0) {
        std::printf("{\"trace\": %s, \"wall_us\": %.3f, \"cpu_us\": %.3f}\n",
                    trace ? "true" : "false", (wall() - began[0]) * 1e6, (cpu() - began[1]) * 1e6);
      }
      first.zero_grad();
      second.zero_grad();
    }
  }
  return 0;
}

/// What the actions of a schedule take where no rank waits for another, by stage.
pipeline::Costs free_costs(const pipeline::Schedule& schedule, const std::vector<Stage>& stages,
                           bool trains) {
  constexpr int kMicrobatches = 4;
  pipeline::Costs costs;
  costs.forward.clear();
  costs.backward_input.clear();
  costs.backward_weight.clear();
  const auto by_stage = bench::run_free(schedule, stages, kMicrobatches, trains);
  for (const auto& order : schedule.ranks) {
    for (const auto& action : order) {
      TORCH_CHECK(
          !pipeline::is_compute(action.kind) || by_stage[action.stage].mean(action.kind) > 0,
          "no microbatch that ran freely has such an action (action: ", pipeline::to_string(action),
          ")");
    }
  }
  for (const auto& taken : by_stage) {
    costs.forward.push_back(taken.mean(pipeline::ActionKind::forward));
    costs.backward_input.push_back(taken.mean(pipeline::ActionKind::backward_input));
    costs.backward_weight.push_back(taken.mean(pipeline::ActionKind::backward_weight));
    costs.backward.push_back(taken.mean(pipeline::ActionKind::backward));
  }
  return costs;
}

/// All that a sleeping stage does, but the sleep. Another tenant of a shared core takes its caches within a millisecond,
/// and torch takes three times as long with cold ones.
void keep_warm() {
  using pipeline::ActionKind;
  thread_local const Stage stage = [] {
    at::set_num_threads(1);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    return bench::sleep_stage(std::make_shared<bench::Seconds>(), std::make_shared<bench::Live>());
  }();
  thread_local bool splits = false;
  splits = !splits;
  const int inner = 1;
  bench::Left left;
  bench::act({inner, ActionKind::forward, 0}, stage, left);
  if (splits) {
    bench::act({inner, ActionKind::backward_input, 0}, stage, left);
    bench::act({inner, ActionKind::backward_weight, 0}, stage, left);
  } else {
    bench::act({inner, ActionKind::backward, 0}, stage, left);
  }
}

/// Makes sleeps shorter by what torch adds to them on ranks that do not wait for each other: there an action takes its
/// planned time, in the fastest of some passes.
void make_room_for_torch(const pipeline::Schedule& schedule, const std::vector<Stage>& stages,
                         bool trains, const std::vector<std::shared_ptr<bench::Seconds>>& sleeps) {
  constexpr int kPasses = 5;
  std::vector<bench::Seconds> planned(sleeps.size());
  std::ranges::transform(sleeps, planned.begin(), [](const auto& sleep) { return *sleep; });
  constexpr double kNone = std::numeric_limits<double>::infinity();
  struct Added {
    double forward = kNone, backward = kNone, input = kNone, weight = kNone;
  };
  std::vector<Added> added(stages.size());
  const auto lower = [](double& least, double taken, double planned) {
    least = taken > 0 ? std::min(least, taken - planned) : least;
  };
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto free = free_costs(schedule, stages, trains);
    for (size_t i = 0; i < stages.size(); ++i) {
      const auto& [forward, input, weight] = planned[i];
      lower(added[i].forward, free.forward[i], forward);
      lower(added[i].backward, free.backward[i], input + weight);
      lower(added[i].input, free.backward_input[i], input);
      lower(added[i].weight, free.backward_weight[i], i == 0 ? input + weight : weight);
    }
  }
  const auto shorten = [](double& sleep, double by) {
    sleep -= std::isfinite(by) ? std::clamp(by, 0.0, sleep) : 0;
  };
  for (size_t i = 0; i < stages.size(); ++i) {
    shorten(sleeps[i]->forward, added[i].forward);
    if (i == 0) {  // all of its backward is the weight's
      shorten(sleeps[i]->weight, std::min(added[i].weight, added[i].backward));
    } else {
      shorten(sleeps[i]->input, std::min(added[i].input, added[i].backward / 2));
      shorten(sleeps[i]->weight, std::min(added[i].weight, added[i].backward / 2));
    }
  }
}

/// Six steps, and more until `seconds` have passed, each after the same actions on free ranks.
int sleep(const std::string& schedule, int ranks, int per_rank, int microbatches, bool equal,
          double seconds) {
  bench::Alarm alarm(&keep_warm);
  const int stages = ranks * per_rank;
  std::vector<Stage> parts;
  std::vector<std::shared_ptr<bench::Live>> live;
  std::vector<std::shared_ptr<bench::Seconds>> sleeps;
  pipeline::Costs costs;
  costs.forward.clear();
  costs.backward_input.clear();
  costs.backward_weight.clear();
  for (int i = 0; i < stages; ++i) {
    const bench::Seconds seconds =
        equal ? bench::Seconds{0.004, 0.004, 0.004}
              : bench::Seconds{0.003 + 0.001 * (i % 2), 0.004 + 0.001 * ((i + 1) % 2), 0.003};
    live.push_back(std::make_shared<bench::Live>());
    sleeps.push_back(std::make_shared<bench::Seconds>(seconds));
    parts.push_back(bench::sleep_stage(sleeps.back(), live.back()));
    const bool first = i == 0;  // it has no I to speak of: its input needs no gradient
    costs.forward.push_back(seconds.forward);
    costs.backward_input.push_back(first ? 0 : seconds.input);
    costs.backward_weight.push_back(first ? seconds.input + seconds.weight : seconds.weight);
  }
  PipelineOptions options;
  options.devices.assign(ranks, c10::Device(c10::DeviceType::CPU));
  options.schedule = schedule;
  options.microbatches = microbatches;
  options.threads_per_rank = 1;
  Pipeline pipe(parts, options);
  const auto order = pipe.schedule(microbatches);
  const auto planned = pipeline::simulate(order, costs);
  const bool trains = pipeline::has_backward(order);
  make_room_for_torch(order, parts, trains, sleeps);
  const auto data = at::zeros({microbatches, 1});
  const double began = wall();
  for (int step = 0; step < 6 || wall() - began < seconds; ++step) {
    const auto free = free_costs(order, parts, trains);
    for (const auto& counter : live) {
      counter->peak = 0;
    }
    Outcome outcome;
    if (trains) {
      outcome = pipe.step(data, data, mse);
    } else {
      const auto began = wall();
      pipe.forward(data);
      outcome.total_ms = (wall() - began) * 1e3;
    }
    std::printf("{\"makespan_s\": %.6f, \"planned_s\": %.6f, \"free_s\": %.6f, ",
                outcome.total_ms / 1e3, planned.makespan, pipeline::simulate(order, free).makespan);
    std::printf("\"stages\": [");
    for (int i = 0; trains && i < stages; ++i) {  // inference holds nothing for later
      std::printf("%s{\"live\": %d, \"bytes\": %ld, \"planned\": %.0f}", i == 0 ? "" : ", ",
                  outcome.stages[i].peak_live,
                  static_cast<long>(live[i]->peak.load() * bench::Live::kBytes),
                  planned.peak_live[i]);
    }
    std::printf("], \"left\": %d, \"activation_bytes\": %ld}\n", live[0]->now.load(),
                static_cast<long>(bench::Live::kBytes));
    std::fflush(stdout);
  }
  return 0;
}

/// Both passes of one stage, without the other.
void alone(const Linear& layer, const at::Tensor& x, int64_t microbatches) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  for (int64_t i = 0; i < microbatches; ++i) {
    const auto input = x.detach().set_requires_grad(true);
    layer(input).sum().backward();
  }
}

int matmul(int64_t size, int64_t microbatches, int rounds) {
  at::set_num_threads(1);
  const Linear first(size);
  const Linear second(size);
  PipelineOptions options;
  options.microbatches = microbatches;
  options.threads_per_rank = 1;
  // As a stage in the middle has it, the first one computes its input's gradient too.
  const auto with_gradient = [&](const at::Tensor& x) {
    return first(x.detach().set_requires_grad(true));
  };
  Pipeline pipe({pipeline::make_stage(with_gradient, {first.weight, first.bias}), second.stage()},
                options);
  const auto batch = at::randn({size * microbatches, size});
  const auto one = batch.narrow(0, 0, size);
  const auto sum = [](const at::Tensor& output, const at::Tensor&) { return output.sum(); };
  const auto in_pipe = [&] { pipe.step(batch, batch, sum); };
  const auto free = [&] {
    std::thread other([&] {
      at::set_num_threads(1);
      alone(second, one, microbatches);
    });
    alone(first, one, microbatches);
    other.join();
  };
  const auto in_turn = [&] {
    alone(first, one, microbatches);
    alone(second, one, microbatches);
  };
  const auto timed = [&](const std::function<void()>& work) {
    first.zero_grad();
    second.zero_grad();
    const auto began = wall();
    work();
    return wall() - began;
  };
  for (int round = -2; round < rounds; ++round) {
    const double seconds[] = {timed(in_pipe), timed(free), timed(in_turn)};
    if (round >= 0) {
      std::printf("{\"pipeline_s\": %.6f, \"free_s\": %.6f, \"in_turn_s\": %.6f}\n", seconds[0],
                  seconds[1], seconds[2]);
      std::fflush(stdout);
    }
  }
  return 0;
}
}  // namespace

int main(int count, char** words) {
  const std::vector<std::string> arguments(words + 1, words + count);
  const auto number = [&](size_t i) { return std::stoi(arguments.at(i)); };
  memory::install();
  const auto& mode = arguments.at(0);
  if (mode == "actions") {
    return actions(number(1));
  }
  if (mode == "sleep") {
    return sleep(arguments.at(1), number(2), number(3), number(4), number(5) != 0, number(6));
  }
  if (mode == "matmul") {
    return matmul(number(1), number(2), number(3));
  }
  std::fprintf(stderr, "no such mode (mode: %s)\n", mode.c_str());
  return 2;
}
