// What another thread may ask of a pipeline in the middle of a step.
#include <brimful/pipeline/pipeline.h>
#include "support/catch.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <future>
#include <latch>

namespace test_pipeline_progress {

using namespace brimful;
using namespace brimful::test;
using pipeline::Action;
using pipeline::ActionKind;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

TEST_CASE("Another thread sees where the ranks of a step are, and may not step", "[pipeline]") {
  const Watchdog watchdog("progress");
  const Layers model(2);
  auto stages = model.stages();
  std::latch inside(1);
  std::latch go_on(1);
  int calls = 0;
  stages[1].forward = [&, inner = stages[1].forward](const pipeline::Value& input) {
    if (++calls == 2) {
      inside.count_down();
      go_on.wait();
    }
    return inner(input);
  };
  PipelineOptions options;
  options.microbatches = 3;
  options.schedule = "gpipe";
  Pipeline pipe(stages, options);
  const auto x = filled({6, 4}, 3, at::kDouble);
  CHECK(pipe.progress().doing == "no call is under way");
  CHECK(pipe.progress().ranks.empty());
  auto stepping = std::async(std::launch::async, [&] { pipe.step(x, x, mse); });
  inside.wait();
  auto progress = pipe.progress();
  while (!progress.ranks.at(0).waits) {  // rank 0 has come to its first backward
    std::this_thread::yield();
    progress = pipe.progress();
  }
  CHECK(progress.doing == "a step: its actions");
  REQUIRE(progress.ranks.size() == 2);
  CHECK(progress.ranks[0].action.kind == ActionKind::backward);
  CHECK(progress.ranks[0].done == 3);
  CHECK(progress.ranks[1].action == Action{1, ActionKind::forward, 1});
  CHECK(progress.ranks[1].done == 1);
  CHECK(progress.ranks[1].actions == 6);
  CHECK_FALSE(progress.ranks[1].waits);
  CHECK(progress.ranks[1].seconds > 0);
  const auto text = pipe.to_string();
  CHECK_THAT(text, Catch::Contains("now: a step: its actions"));
  CHECK_THAT(text, Catch::Contains("rank 0: action 4 of 6, 0B") &&
                       Catch::Contains("in stage 0), waits for its message, for "));
  CHECK_THAT(text, Catch::Contains(
                       "rank 1: action 2 of 6, 1F1 (forward of microbatch 1 in stage 1), for "));
  CHECK_THROWS_WITH(pipe.step(x, x, mse),
                    Catch::Contains("another thread is in a call of this pipeline (call: step)"));
  CHECK_THROWS_WITH(pipe.forward(x), Catch::Contains("call: forward"));
  go_on.count_down();
  stepping.get();
  CHECK(pipe.progress().ranks.empty());
  CHECK_THAT(pipe.to_string(), Catch::Contains("last step: gpipe"));
}

}  // namespace test_pipeline_progress
