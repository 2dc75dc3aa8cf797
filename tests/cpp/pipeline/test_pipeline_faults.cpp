// What a step leaves behind when any of its actions fails: nothing, within a second, and the next step works.
#include <brimful/error.h>
#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <brimful/pipeline/schedules.h>
#include <brimful/step/pieces.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <typeinfo>
#include <utility>

namespace test_pipeline_faults {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {

constexpr int kMicrobatches = 5;
constexpr int64_t kRows = 11;

/// Fails one action of one rank, a number of times.
struct Planted {
  std::atomic<int> rank{-1};
  std::atomic<int> index{-1};
  std::atomic<int> left{0};
  bool out_of_memory = false;
  std::function<void()> instead;  ///< of an error

  void arm(int at_rank, int at_index, int times = 1) {
    rank = at_rank;
    index = at_index;
    left = times;
  }
  void reached(int at_rank, int at_index) {
    if (at_rank == rank && at_index == index && left.fetch_sub(1) > 0) {
      if (instead) {
        return instead();
      }
      if (out_of_memory) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "planted");
      }
      throw std::runtime_error("planted");
    }
  }
};

struct Trained {
  /// `recomputed`: all stages are. The first one then leaves the batch as it is.
  Trained(const std::string& schedule, int ranks, int stages, bool out_of_memory,
          bool recomputed = false, bool may_recompute = true)
      : model(stages) {
    planted.out_of_memory = out_of_memory;
    buffer = at::zeros({2}, at::kDouble);
    auto parts = model.stages();
    parts[0].buffers = {buffer};
    parts[0].forward = [this, inner = parts[0].forward, recomputed](const pipeline::Value& input) {
      const at::NoGradGuard no_grad_for_the_buffer;
      buffer.add_(1);
      if (recomputed) {
        const at::AutoGradMode again(true);
        return inner(input);
      }
      input.tensors[0].mul_(2);  // a repeated step would find other rows in the batch
      const auto as_given = input.tensors[0] / 2;
      const at::AutoGradMode again(true);
      return inner(pipeline::value_of(as_given));
    };
    PipelineOptions options;
    options.schedule = schedule;
    options.devices.assign(ranks, c10::Device(c10::DeviceType::CPU));
    options.microbatches = kMicrobatches;
    options.recompute_all = recomputed;
    options.recompute = may_recompute;
    options.before_action = [this](int rank, int index, const pipeline::Action& action) {
      planted.reached(rank, index);
      if (watch) {
        watch(rank, index, action);
      }
    };
    pipe = std::make_unique<Pipeline>(std::move(parts), std::move(options));
    mse(model(x), y).backward();
    expected = copies(model.gradients());
    model.zero_grad();
  }

  void require_good_step(double factor = 1) {
    pipe->step(x.clone(), y, mse);
    auto wanted = copies(expected);
    for (auto& gradient : wanted) {
      gradient.mul_(factor);
    }
    REQUIRE(all_close(model.gradients(), wanted));
  }

  Layers model;
  at::Tensor buffer;
  Planted planted;
  std::function<void(int rank, int index, const pipeline::Action& action)> watch;
  at::Tensor x = filled({kRows, 4}, 3, at::kDouble);
  at::Tensor y = filled({kRows, 4}, 4, at::kDouble);
  std::vector<at::Tensor> expected;
  std::unique_ptr<Pipeline> pipe;
};

struct Case {
  std::string schedule;
  int ranks;
  int stages;
};
const auto kCases = {Case{"gpipe", 2, 2}, Case{"1f1b", 3, 3}, Case{"interleaved_1f1b", 2, 4},
                     Case{"zb_h1", 2, 2}, Case{"zbv", 2, 4}};

double seconds_of(const std::function<void()>& fn) {
  const auto began = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}
}  // namespace

TEST_CASE("An error in any action is raised with its place, and leaves nothing of the step",
          "[pipeline][faults]") {
  const QuietLog quiet;
  memory::install();
  const Watchdog watchdog("an error in any action", std::chrono::seconds(90));
  const bool recomputed = GENERATE(false, true);
  for (const auto& [schedule, ranks, stages] : kCases) {
    Trained trained(schedule, ranks, stages, false, recomputed);
    trained.require_good_step();  // gradients of an earlier step are there, and stay
    const auto order = trained.pipe->schedule(kMicrobatches);
    const auto split = split_rows(kRows, kMicrobatches);
    const auto given = trained.x.clone();
    const auto before = memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int index = 0; index < std::ssize(order.ranks[rank]); ++index) {
        CAPTURE(schedule, rank, index, recomputed);
        const auto buffer = trained.buffer.clone();
        trained.planted.arm(rank, index);
        std::string text;
        const auto seconds = seconds_of([&] {
          try {
            trained.pipe->step(given, trained.y, mse);
          } catch (const std::runtime_error& error) {
            text = error.what();
          }
        });
        const auto& action = order.ranks[rank][index];
        REQUIRE(text.find("planted (in the ") == 0);
        REQUIRE(text.find("microbatch " + std::to_string(action.microbatch) + " in stage " +
                          std::to_string(action.stage)) != std::string::npos);
        // A forward has not taken its input yet; of what comes later the text is there, though I has freed the tensors.
        const auto rows = std::to_string(split[action.microbatch]);
        CAPTURE(text);
        REQUIRE(text.find(action.kind == pipeline::ActionKind::forward
                              ? "inputs: no tensor"
                              : "inputs: [" + rows + ", 4] Double") != std::string::npos);
        REQUIRE(seconds < 1);
        REQUIRE(trained.pipe->last_failure()->index == index);
        REQUIRE(at::equal(trained.buffer, buffer));
        REQUIRE(at::equal(given, trained.x));
        REQUIRE(all_close(trained.model.gradients(), trained.expected));
        REQUIRE(memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes ==
                before + static_cast<int64_t>(buffer.nbytes()));
      }
    }
    trained.require_good_step(2);
  }
}

namespace {
/// Its constructor needs more than what().
struct OutOfReach : std::out_of_range {
  explicit OutOfReach(int wanted) : std::out_of_range("out of reach"), index(wanted) {}
  int index;
};
struct Unrelated : std::exception {
  const char* what() const noexcept override { return "unrelated"; }
};

/// Runs a step whose second stage throws what `fail` does.
void step_that_fails(const std::function<void()>& fail) {
  const Layers model(1);
  const auto failing = [&](const at::Tensor& x) {
    fail();
    return x;
  };
  PipelineOptions options;
  options.microbatches = 2;
  Pipeline pipe({pipeline::make_stage(model.layers[0], model.layers[0].parameters()),
                 pipeline::make_stage(failing)},
                options);
  try {
    pipe.step(filled({4, 4}, 3, at::kDouble), filled({4, 4}, 4, at::kDouble), mse);
  } catch (...) {
    CHECK(pipe.last_failure()->action.stage == 1);
    throw;
  }
}

template <typename Error, typename Thrown>
void require_place(const Thrown& thrown) {
  const auto where = Catch::Contains(" (in the forward of microbatch 0 in stage 1 (");
  try {
    step_that_fails([&] { throw thrown; });
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Catch::StartsWith(thrown.what()) && where);
    if (typeid(Error) == typeid(Thrown)) {
      CHECK(typeid(error) == typeid(Error));
    } else {
      CHECK_THROWS_AS(std::rethrow_if_nested(error), Thrown);
    }
  }
}
}  // namespace

TEST_CASE("Errors of the standard library and those derived from them say where they were thrown",
          "[pipeline][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("errors of many types");
  require_place<std::logic_error>(std::logic_error("planted"));
  require_place<std::invalid_argument>(std::invalid_argument("planted"));
  require_place<std::domain_error>(std::domain_error("planted"));
  require_place<std::length_error>(std::length_error("planted"));
  require_place<std::out_of_range>(std::out_of_range("planted"));
  require_place<std::range_error>(std::range_error("planted"));
  require_place<std::overflow_error>(std::overflow_error("planted"));
  require_place<std::underflow_error>(std::underflow_error("planted"));
  require_place<std::out_of_range>(OutOfReach(7));
  try {
    step_that_fails([] { throw OutOfReach(7); });
  } catch (const std::exception& error) {
    try {
      std::rethrow_if_nested(error);
    } catch (const OutOfReach& original) {
      CHECK(original.index == 7);
    }
  }
  const auto no_file = std::make_error_code(std::errc::no_such_file_or_directory);
  require_place<std::runtime_error>(std::system_error(no_file, "planted"));
  try {
    step_that_fails([&] { throw std::system_error(no_file, "planted"); });
  } catch (const std::system_error& error) {
    CHECK(error.code() == no_file);
  }
  CHECK_THROWS_AS(step_that_fails([] { throw Unrelated(); }), Unrelated);
  CHECK_THROWS_AS(step_that_fails([] { throw 7; }), int);
}

TEST_CASE("Memory that runs out in any action repeats the step with twice the microbatches",
          "[pipeline][faults]") {
  const QuietLog quiet;
  memory::install();
  const Watchdog watchdog("memory that runs out", std::chrono::seconds(90));
  const bool recomputed = GENERATE(false, true);
  for (const auto& [schedule, ranks, stages] : kCases) {
    const auto count = Trained(schedule, ranks, stages, true).pipe->schedule(kMicrobatches);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int index = 0; index < std::ssize(count.ranks[rank]); ++index) {
        CAPTURE(schedule, rank, index, recomputed);
        Trained trained(schedule, ranks, stages, true, recomputed);
        trained.planted.arm(rank, index);
        const auto outcome = trained.pipe->step(trained.x.clone(), trained.y, mse);
        REQUIRE(outcome.retries == 1);
        REQUIRE(outcome.pieces == 10);
        REQUIRE(trained.buffer[0].item<double>() == 10);
        REQUIRE(all_close(trained.model.gradients(), trained.expected));
        trained.model.zero_grad();
        REQUIRE(trained.pipe->step(trained.x, trained.y, mse).pieces == 6);  // of two rows
      }
    }
  }
}

TEST_CASE("A call that is cancelled in any action leaves nothing of the step",
          "[pipeline][faults]") {
  const QuietLog quiet;
  memory::install();
  const Watchdog watchdog("a call that is cancelled", std::chrono::seconds(90));
  for (const auto& [schedule, ranks, stages] : kCases) {
    Trained trained(schedule, ranks, stages, false);
    trained.require_good_step();
    trained.planted.instead = [&] {  // ends while the action goes on, and after the step's last one
      trained.pipe->cancel();
      std::this_thread::sleep_for(
          std::chrono::milliseconds(trained.planted.index % 5 == 0 ? 120 : 0));
    };
    const auto order = trained.pipe->schedule(kMicrobatches);
    const auto given = trained.x.clone();
    const auto before = memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int index = 0; index < std::ssize(order.ranks[rank]); ++index) {
        CAPTURE(schedule, rank, index);
        const auto buffer = trained.buffer.clone();
        trained.planted.arm(rank, index);
        const auto seconds = seconds_of([&] {
          REQUIRE_THROWS_AS(trained.pipe->step(given, trained.y, mse), pipeline::Interrupted);
        });
        REQUIRE(seconds < 1);
        REQUIRE(trained.pipe->is_usable());
        REQUIRE(at::equal(trained.buffer, buffer));
        REQUIRE(at::equal(given, trained.x));
        REQUIRE(all_close(trained.model.gradients(), trained.expected));
        REQUIRE(memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes ==
                before + static_cast<int64_t>(buffer.nbytes()));
      }
    }
    trained.require_good_step(2);
  }
}

TEST_CASE("A batch that fits in no number of microbatches says where memory ran out",
          "[pipeline][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("a batch that fits in no number of microbatches");
  Trained trained("1f1b", 3, 3, true, false, /*may_recompute=*/false);
  trained.require_good_step();
  trained.planted.arm(1, 0, 100);
  std::string text;
  try {
    trained.pipe->step(trained.x.clone(), trained.y, mse);
  } catch (const BatchTooLarge& error) {
    text = error.what_without_backtrace();
    CHECK(error.facts().tried.size() == 3);
    CHECK(error.facts().rank == 1);
  }
  CAPTURE(text);
  CHECK(text.find("forward of microbatch 0 in stage 1") != std::string::npos);
  CHECK(text.find("5 microbatches of 3 rows") != std::string::npos);
  CHECK(all_close(trained.model.gradients(), trained.expected));
  trained.planted.arm(-1, -1, 0);
  trained.require_good_step(2);
}

TEST_CASE("A refused allocation in any stage repeats the step", "[pipeline][faults]") {
  const QuietLog quiet;
  memory::install();
  const c10::Device cpu(c10::DeviceType::CPU);
  const Watchdog watchdog("a limit of memory", std::chrono::seconds(60));
  const Layer first(1, 64, 64);
  const Layer second(2, 64, 64);
  std::vector<pipeline::Stage> stages{pipeline::make_stage(first, first.parameters()),
                                      pipeline::make_stage(second, second.parameters())};
  PipelineOptions options;
  options.microbatches = 2;
  Pipeline pipe(stages, options);
  const auto x = filled({256, 64}, 3, at::kDouble);
  const auto y = filled({256, 64}, 4, at::kDouble);
  pipe.step(x, y, mse);
  const auto all = {first.weight, first.bias, second.weight, second.bias};
  const auto expected = copies({all.begin(), all.end()});
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : all) {
    gradients.push_back(parameter.grad().clone());
    parameter.mutable_grad().reset();
  }
  const auto used = memory::stats(cpu).used_bytes;
  const auto peak = [&] {
    const memory::PeakScope scope(cpu);
    pipe.step(x, y, mse);
    return scope.peak_bytes();
  }();
  for (const auto& parameter : all) {
    parameter.mutable_grad().reset();
  }
  memory::set_limit(cpu, used + (peak - used) * 2 / 3);
  const auto outcome = pipe.step(x, y, mse);
  memory::set_limit(cpu, std::nullopt);
  CHECK(outcome.retries > 0);
  CHECK(outcome.pieces == int64_t{2} << outcome.retries);
  for (size_t i = 0; i < gradients.size(); ++i) {
    CHECK(at::allclose(all.begin()[i].grad(), gradients[i], 1e-12, 1e-14));
  }
}

// Of a stage's thread: copies of what its forward changes, what its second run takes, what the comparison does.
TEST_CASE(
    "An allocation that is refused in a recomputed stage repeats the step and changes nothing",
    "[pipeline][faults]") {
  const QuietLog quiet;
  memory::install();
  const Watchdog watchdog("refused allocations of recomputed stages", std::chrono::seconds(90));
  for (const auto* schedule : {"1f1b", "zb_h1"}) {
    int64_t refused = 0;
    for (int64_t allocation = 0; allocation == refused; ++allocation) {
      CAPTURE(schedule, allocation);
      Trained trained(schedule, 2, 2, false, true);
      std::optional<memory::FaultAt> fault;
      bool is_armed = true;
      trained.watch = [&](int rank, int index, const pipeline::Action& action) {
        if (rank != 0) {
          return;
        }
        const bool is_last =
            action.microbatch == kMicrobatches - 1 && action.kind != pipeline::ActionKind::forward;
        if (fault && (index == 0 || is_last)) {
          refused += fault->fired() ? 1 : 0;
          fault.reset();
        } else if (index == 0 && std::exchange(is_armed, false)) {
          fault.emplace(allocation, /*unlimited_too=*/true);
        }
      };
      const auto outcome = trained.pipe->step(trained.x.clone(), trained.y, mse);
      REQUIRE(recomputed_stages(outcome) == std::vector<int>{0, 1});
      REQUIRE(trained.buffer[0].item<double>() == static_cast<double>(outcome.pieces));
      REQUIRE(all_close(trained.model.gradients(), trained.expected));
    }
    CHECK(refused > 20);
  }
}

}  // namespace test_pipeline_faults
