// What the executor itself does with schedules that have small mistakes, and that the checker says so.
#include "support/catch.h"

#include <ATen/ATen.h>
#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule_text.h>
#include "pipeline/executor/executor.h"

#include <map>

#include "pipeline/mutations.h"
#include "support/stuck_watch.h"
#include "support/watchdog.h"

namespace test_executor_fuzz {

using namespace brimful::pipeline;
using brimful::PieceLoss;
using brimful::test::mutate;
using brimful::test::Random;
using brimful::test::random_schedule;
using brimful::test::StuckWatch;
using brimful::test::Watchdog;

namespace {
constexpr int kRounds = 10'000;
constexpr int kWithTensors = 25;  // one of so many rounds has a graph, and gradients to compare

enum class Ending { complete, stuck, failed };

/// Says where a value without tensors has come from.
struct Tag : Form {
  Tag(int of_stage, int of_microbatch) : stage(of_stage), microbatch(of_microbatch) {}
  std::string to_string() const override { return "tag"; }
  int stage;
  int microbatch;
};

Value tagged(int stage, int microbatch) {
  return {{}, std::make_shared<Tag>(stage, microbatch)};
}

const Tag& tag_of(const Value& value, int stage) {
  const auto& tag = dynamic_cast<const Tag&>(*value.form);
  TORCH_CHECK(tag.stage == stage, "a stage got another one's value");
  return tag;
}

/// Stages that do next to nothing.
class Model {
 public:
  Model(int ranks, int stages, bool has_tensors) : has_tensors_(has_tensors), stages_(stages) {
    std::vector<Stage> made;
    for (int i = 0; i < stages; ++i) {
      made.push_back(has_tensors ? scaling_stage() : passing_stage(i));
    }
    ExecutorOptions options;
    options.devices.assign(ranks, c10::Device(c10::DeviceType::CPU));
    options.spin = std::chrono::microseconds(0);
    options.trace = false;
    const StuckWatch::Tasks before = StuckWatch::tasks();
    executor_ = std::make_unique<Executor>(std::move(made), options);
    threads_ = StuckWatch::tasks();
    std::erase_if(threads_, [&](pid_t task) {
      return std::find(before.begin(), before.end(), task) != before.end();
    });
  }

  Ending run(const Schedule& schedule, StuckWatch& watch) {
    StepWork work;
    work.input = [this](int i) { return has_tensors_ ? value_of(number(i)) : tagged(-1, i); };
    if (has_backward(schedule)) {
      work.loss = [this](int i, const Value& output) { return loss(i, output); };
    }
    const StuckWatch::Scope scope(watch, threads_, [this] { executor_->cancel(); });
    try {
      const auto result = executor_->run(schedule, work);
      if (result.cancelled) {
        return Ending::stuck;
      }
      return result.failure ? Ending::failed : Ending::complete;
    } catch (const c10::ValueError&) {
      return Ending::failed;
    }
  }

  /// After a step: whether every microbatch has counted once in every stage.
  bool has_all_gradients(int microbatches) {
    bool good = true;
    for (const auto& weight : weights_) {
      const auto gradient = weight.grad();
      good = good && gradient.defined() &&
             gradient.item<double>() == microbatches * (microbatches + 1) / 2.0;
    }
    return good;
  }
  void zero_grad() {
    for (const auto& weight : weights_) {
      weight.mutable_grad().reset();
    }
  }

 private:
  static at::Tensor number(int microbatch) { return at::full({}, microbatch + 1.0, at::kDouble); }

  Stage passing_stage(int index) {
    Stage stage;
    stage.forward = [index](const Value& input) {
      return tagged(index, tag_of(input, index - 1).microbatch);
    };
    return stage;
  }
  Stage scaling_stage() {
    const auto weight = at::ones({}, at::kDouble).set_requires_grad(true);
    weights_.push_back(weight);
    return make_stage([weight](const at::Tensor& x) { return at::Tensor(x * weight); }, {weight});
  }
  PieceLoss loss(int microbatch, const Value& output) const {
    if (has_tensors_) {
      return {output.tensors.at(0), 1};
    }
    TORCH_CHECK(tag_of(output, stages_ - 1).microbatch == microbatch, "another microbatch's value");
    return {zero_, 0};
  }

  bool has_tensors_;
  int stages_;
  at::Tensor zero_ = at::zeros({});
  std::vector<at::Tensor> weights_;
  std::unique_ptr<Executor> executor_;
  StuckWatch::Tasks threads_;
};

class Models {
 public:
  Model& model(int ranks, int stages, bool has_tensors) {
    auto& model = models_[{ranks, stages, has_tensors}];
    if (model == nullptr) {
      model = std::make_unique<Model>(ranks, stages, has_tensors);
    }
    return *model;
  }

 private:
  std::map<std::tuple<int, int, bool>, std::unique_ptr<Model>> models_;
};
}  // namespace

TEST_CASE("The checker's verdict on mutated schedules is what the executor does",
          "[pipeline][faults]") {
  const Watchdog watchdog("mutated schedules", std::chrono::seconds(100));
  const CheckOptions as_threads{std::nullopt, ChannelKind::by_message};
  Models models;
  StuckWatch watch;
  Random random(411);
  int fine = 0;
  int stuck = 0;
  int failed = 0;
  for (int round = 0; round < kRounds; ++round) {
    const bool has_tensors = round % kWithTensors == 0;
    auto schedule = random_schedule(random, 3, 3);
    auto& model =
        models.model(static_cast<int>(schedule.ranks.size()), schedule.stages, has_tensors);
    const bool keeps_all = random.below(4) > 0;
    for (int times = random.below(4); times > 0; --times) {
      mutate(schedule, keeps_all, random);
    }
    const auto verdict = check(schedule, as_threads);
    const auto ending = model.run(schedule, watch);
    const bool agrees = verdict.ok()               ? ending == Ending::complete
                        : verdict.problems.empty() ? ending == Ending::stuck
                                                   : ending != Ending::complete;
    const bool counts = has_tensors && verdict.ok() && has_backward(schedule);
    if (!agrees || (counts && !model.has_all_gradients(schedule.microbatches))) {
      FAIL("round " << round << ": the checker says '" << verdict.to_string()
                    << "', the executor ends with " << static_cast<int>(ending) << "\n"
                    << schedule.name << ", " << schedule.stages << " stages, "
                    << schedule.microbatches << " microbatches:\n"
                    << to_csv(schedule));
    }
    model.zero_grad();
    ++(verdict.ok() ? fine : verdict.problems.empty() ? stuck : failed);
  }
  INFO(fine << " valid, " << stuck << " deadlocks, " << failed << " others");
  CHECK(fine > 2000);
  CHECK(stuck > 300);
  CHECK(failed > 2000);
}

}  // namespace test_executor_fuzz
