#include <ATen/ATen.h>
#include "support/catch.h"

#include <brimful/sizer/rule_vote.h>

#include <cmath>
#include <string>

#include "sizer/gradient_sketch.h"
#include "sizer/loss_trial.h"
#include "sizer/rule_evidence.h"

namespace test_loss_rule {

using namespace brimful;
using brimful::detail::GradientSketch;
using brimful::detail::LossTrial;
using brimful::detail::RuleEvidence;

namespace {
double norm(const std::array<double, brimful::detail::kProjections>& values) {
  double sum = 0;
  for (const auto value : values) {
    sum += value * value;
  }
  return std::sqrt(sum / brimful::detail::kProjections);
}

std::array<double, brimful::detail::kProjections> sketch_of(
    const std::vector<at::Tensor>& gradients) {
  GradientSketch sketch;
  for (size_t i = 0; i < gradients.size(); ++i) {
    sketch.add(static_cast<int64_t>(i), gradients[i]);
  }
  return sketch.values();
}

}  // namespace

TEST_CASE("A sketch has about the norm of its gradients, and is the same again",
          "[sizer][loss-rule]") {
  at::manual_seed(1);
  for (const int64_t size : {3, 4096, 4097, 300000}) {
    const std::vector<at::Tensor> gradients{at::randn({size}), at::randn({size, 2}).t()};
    const auto found = sketch_of(gradients);
    CHECK(found == sketch_of(gradients));
    const auto exact = at::cat({gradients[0], gradients[1].flatten()}).norm().item<double>();
    CHECK(norm(found) > 0.5 * exact);
    CHECK(norm(found) < 1.7 * exact);
  }
}

TEST_CASE("Parameters, and blocks of one, have signs of their own", "[sizer][loss-rule]") {
  const auto ones = at::ones({8192});
  GradientSketch first;
  first.add(0, ones);
  first.add(1, -ones);
  CHECK(norm(first.values()) > 10);
  const auto halves = at::cat({at::ones({4096}), -at::ones({4096})});
  CHECK(norm(sketch_of({halves})) > 10);
}

TEST_CASE("Rows of a sparse gradient have signs of their own", "[sizer][loss-rule]") {
  const auto of_row = [](int64_t row) {
    return at::sparse_coo_tensor(at::full({1, 1}, row, at::kLong), at::ones({1, 5000}), {4, 5000},
                                 at::TensorOptions(at::kFloat));
  };
  const auto first = sketch_of({of_row(1)});
  const auto second = sketch_of({of_row(2)});
  CHECK(norm(first) > 35);
  CHECK(first != second);
}

namespace {
/// A net, eight rows of which some are ignored, and a loss by its reduction.
struct Fixture {
  at::Tensor weight = at::randn({5, 3}).requires_grad_();
  at::Tensor bias = at::zeros({3}).requires_grad_();
  at::Tensor x = at::randn({8, 5});
  at::Tensor y = at::tensor({0, 1, -100, -100, -100, 2, 1, 0}, at::kLong);
  int64_t forwards = 0;

  LossTrial trial(RuleEvidence& evidence, const std::string& reduction, int64_t most_rows = 4,
                  bool repeats = true) {
    const auto counts = at::stack(
        {at::ones({8}, at::kDouble), at::ones({8}, at::kDouble), y.ne(-100).to(at::kDouble)});
    const auto window = evidence.window(counts, most_rows);
    REQUIRE(window.has_value());
    brimful::detail::TrialPlan plan;
    plan.window = *window;
    plan.weights = evidence.weights(counts, *window);
    Transaction transaction({}, {c10::Device(at::kCPU)});
    const auto forward = [&](int64_t begin, int64_t end) -> PieceLoss {
      ++forwards;
      const auto out = at::tanh(x.slice(0, begin, end)).matmul(weight) + bias;
      const auto labels = y.slice(0, begin, end);
      if (reduction == "contrast") {
        return {at::cross_entropy_loss(out.matmul(out.t()), at::arange(end - begin)), 1};
      }
      if (reduction == "noise") {
        return {out.sum() * static_cast<double>(forwards), 1};
      }
      const auto each = at::cross_entropy_loss(out, labels.clamp_min(0), {}, at::Reduction::None);
      if (reduction == "rows") {
        return {each.mean(), 1};
      }
      const auto counted = labels.ne(-100);
      const auto sum = each.masked_select(counted).sum();
      return {reduction == "sum" ? each.sum() : sum / counted.sum(), 1};
    };
    if (!repeats) {
      plan.repeats = false;
    }
    auto trial = brimful::detail::try_loss({weight, bias}, transaction,
                                           {forward, brimful::detail::gradients_of, {}}, plan);
    evidence.learn(trial);
    return trial;
  }
};

}  // namespace

TEST_CASE("The rule that gradients follow is found in three forwards and backwards of four rows",
          "[sizer][loss-rule]") {
  const auto [reduction, rule] =
      GENERATE(table<std::string, int>({{"rows", 0}, {"sum", 1}, {"labels", 2}}));
  at::manual_seed(2);
  Fixture fixture;
  RuleEvidence evidence(3, 1);
  fixture.trial(evidence, reduction);
  CHECK(evidence.knows());
  CHECK(evidence.agreeing() == uint64_t{1} << rule);
  CHECK_FALSE(evidence.refuses());
  CHECK(fixture.forwards == 4);  // two of them of a part
  CHECK_FALSE(fixture.weight.grad().defined());
  CHECK_FALSE(fixture.bias.grad().defined());
}

TEST_CASE("Two rows do where there is no room for four", "[sizer][loss-rule]") {
  at::manual_seed(2);
  Fixture fixture;
  RuleEvidence evidence(3, 1);
  fixture.trial(evidence, "sum", 2);
  CHECK(evidence.agreeing() == 2);
}

TEST_CASE("A loss that compares rows is that of its pieces by no rule", "[sizer][loss-rule]") {
  at::manual_seed(2);
  Fixture fixture;
  RuleEvidence evidence(3, 1);
  const auto trial = fixture.trial(evidence, "contrast");
  CHECK(evidence.refuses());
  CHECK(evidence.repeats());
  for (const auto distance : trial.distances) {
    CHECK(distance > 10 * trial.tolerance);
  }
}

TEST_CASE("A loss that is another one when it runs again is refused", "[sizer][loss-rule]") {
  at::manual_seed(2);
  Fixture fixture;
  RuleEvidence evidence(3, 1);
  fixture.trial(evidence, "noise");
  CHECK(evidence.refuses());
  CHECK_FALSE(evidence.repeats());
}

TEST_CASE("Where counts are alike the choice waits until they differ", "[sizer][loss-rule]") {
  at::manual_seed(2);
  Fixture fixture;
  const auto labels = fixture.y;
  fixture.y = at::tensor({0, 1, 2, 2, 1, 2, 1, 0}, at::kLong);
  RuleEvidence evidence(3, 1);
  fixture.trial(evidence, "labels");
  CHECK(evidence.agreeing() == 0b101);
  const auto alike = at::ones({3, 8}, at::kDouble);
  CHECK_FALSE(evidence.window(alike, 4).has_value());
  fixture.y = labels;
  fixture.trial(evidence, "labels", 4, /*repeats=*/false);
  CHECK(evidence.agreeing() == 0b100);
  CHECK(fixture.forwards == 7);
}

namespace {
std::vector<ControlRecord> records_of(const std::vector<RuleVote>& votes) {
  std::vector<ControlRecord> records(votes.size());
  for (size_t i = 0; i < votes.size(); ++i) {
    votes[i].put(records[i]);
    records[i] = decode(encode(records[i]));
  }
  return records;
}

RuleVote vote(uint32_t kind, uint64_t agreeing, bool knows) {
  RuleVote made;
  made.kind = kind;
  made.agreeing = agreeing;
  made.knows = knows;
  return made;
}

}  // namespace

TEST_CASE("Ranks take the rule that agrees with what all of them saw", "[sizer][loss-rule]") {
  std::vector<RuleVote> votes{vote(7, 0b110, true), vote(7, 0, false), vote(0, 0, false),
                              vote(7, 0b1100, true), vote(8, 0b1, true)};
  const auto records = records_of(votes);
  for (auto& of : votes) {
    of.settle(records);
  }
  CHECK(votes[0].chosen == 2);
  CHECK(votes[1].chosen == 2);  // it follows
  CHECK(votes[2].chosen == -1);
  CHECK(votes[3].chosen == 2);
  CHECK(votes[4].chosen == 0);  // another kind of batch
}

TEST_CASE("Ranks that saw what excludes each other all raise", "[sizer][loss-rule]") {
  std::vector<RuleVote> votes{vote(7, 0b10, true), vote(7, 0b100, true), vote(8, 1, true)};
  const auto records = records_of(votes);
  for (auto& of : votes) {
    CHECK_THROWS_AS(of.settle(records), c10::ValueError);
  }
}

}  // namespace test_loss_rule
