// Stages that draw random numbers take turns with the generator that their threads share.
#include <ATen/CPUGeneratorImpl.h>
#include <brimful/ladder/activation_checkpoint.h>
#include <brimful/pipeline/pipeline.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <thread>

namespace test_pipeline_draws {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {
constexpr int kStages = 3;

struct Drawing {
  explicit Drawing(int jitter, const std::string& schedule, int draws_from = 0,
                   bool checkpoints = false)
      : model(kStages), first_that_draws(draws_from) {
    auto parts = model.stages();
    for (int i = 0; i < kStages; ++i) {
      const auto forward = [this, i, inner = parts[i].forward](const at::Tensor& x) {
        const auto h = inner(pipeline::value_of(x)).tensors[0];
        return i < first_that_draws ? h : at::dropout(h, 0.5, true);
      };
      parts[i].forward = [forward, checkpoints](const pipeline::Value& input) {
        const auto& x = input.tensors[0];
        return pipeline::value_of(checkpoints ? checkpoint(forward, x) : forward(x));
      };
    }
    PipelineOptions options;
    options.schedule = schedule;
    options.microbatches = 6;
    options.before_action = [jitter](int rank, int index, const pipeline::Action&) {
      std::this_thread::sleep_for(std::chrono::microseconds((rank * 7 + index * 5) % 3 * jitter));
    };
    pipe = std::make_unique<Pipeline>(std::move(parts), std::move(options));
  }
  std::vector<at::Tensor> step() {
    pipe->step(x, y, mse);
    auto gradients = copies(model.gradients());
    model.zero_grad();
    return gradients;
  }

  Layers model;
  int first_that_draws;
  at::Tensor x = filled({12, 4}, 3, at::kDouble);
  at::Tensor y = filled({12, 4}, 4, at::kDouble);
  std::unique_ptr<Pipeline> pipe;
};

void seed(uint64_t number) {
  at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()->set_current_seed(number);
}

bool all_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return at::equal(x, y); });
}
}  // namespace

TEST_CASE("A seed gives the same steps whatever the threads do, and whoever drew before",
          "[pipeline][draws]") {
  const QuietLog quiet;
  const Watchdog watchdog("steps from a seed", std::chrono::seconds(60));
  const std::string schedule = GENERATE("gpipe", "1f1b", "zb_h1");
  seed(7);
  Drawing first(0, schedule);
  const auto one = first.step();
  const auto two = first.step();
  CHECK_FALSE(all_equal(one, two));
  for (const int jitter : {100, 300}) {
    seed(7);
    Drawing other(jitter, schedule);
    CHECK(all_equal(other.step(), one));
    CHECK(all_equal(other.step(), two));
    seed(7);
    CHECK(all_equal(other.step(), one));
  }
  for (const int late : {1, 2, 3}) {  // what begins to draw when others have taken turns for long
    Drawing other(0, schedule, late);
    other.step();
    other.step();
    other.first_that_draws = 0;
    seed(7);
    CHECK(all_equal(other.step(), one));
    CHECK(all_equal(other.step(), two));
  }
}

TEST_CASE("Stages that are checkpoints draw the same numbers in backward", "[pipeline][draws]") {
  const QuietLog quiet;
  const Watchdog watchdog("steps of checkpoints", std::chrono::seconds(60));
  const std::string schedule = GENERATE("gpipe", "1f1b", "zb_h1");
  const int jitter = GENERATE(0, 100);
  seed(7);
  Drawing plain(0, schedule);
  seed(7);
  const auto one = plain.step();
  const auto two = plain.step();
  Drawing other(jitter, schedule, 0, true);
  seed(7);
  CHECK(all_equal(other.step(), one));
  CHECK(all_equal(other.step(), two));
}

}  // namespace test_pipeline_draws
