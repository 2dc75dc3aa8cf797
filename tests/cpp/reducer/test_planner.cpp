#include "support/catch.h"

#include <c10/util/Exception.h>

#include "reducer/planner.h"

#include <functional>

namespace test_planner {

using namespace brimful;

namespace {
constexpr int64_t kMiB = int64_t{1} << 20;

std::vector<ParameterInfo> parameters_of(int count, int64_t bytes) {
  return std::vector<ParameterInfo>(count, ParameterInfo{bytes / 4});
}

/// Steps of a machine whose time for a plan is given by a function.
struct Machine {
  explicit Machine(std::vector<ParameterInfo> infos, PlanOptions options, bool tune)
      : planner(infos, options, tune),
        parameters(infos.size()),
        plan(plan_buckets(infos, options)) {}

  void step(const std::vector<int64_t>& arrivals,
            const std::function<double(const BucketPlan&)>& span_ms) {
    StepTimes times;
    times.total_ms = 100;
    double at_ms = 1;
    for (const auto& bucket : plan.buckets) {
      const auto bytes = static_cast<double>(bucket.parameters.size()) * static_cast<double>(kMiB);
      times.buckets.push_back({at_ms, at_ms + 1, at_ms + 1, at_ms + 1 + 0.1 + bytes * 1e-6,
                               static_cast<int64_t>(bytes), 1});
      at_ms = times.buckets.back().done_ms;
    }
    if (auto next = planner.observe(plan, arrivals, times, span_ms(plan))) {
      plan = std::move(*next);
      ++changes;
    }
    ++steps;
  }

  Planner planner;
  size_t parameters;
  BucketPlan plan;
  int changes = 0;
  int steps = 0;
};

std::vector<int64_t> reversed(size_t count) {
  std::vector<int64_t> order;
  for (auto i = static_cast<int64_t>(count) - 1; i >= 0; --i) {
    order.push_back(i);
  }
  return order;
}
}  // namespace

TEST_CASE("The cost of a collective is fitted as a line", "[reducer]") {
  const auto cost = fit_wire_cost({{0, 2}, {10, 7}, {20, 12}});
  REQUIRE(cost);
  CHECK(cost->startup_ms == Approx(2));
  CHECK(cost->ms_per_byte == Approx(0.5));
  CHECK_FALSE(fit_wire_cost({}));
  CHECK_FALSE(fit_wire_cost({{5, 1}, {5, 3}}));
  CHECK(fit_wire_cost({{0, 9}, {10, 1}})->ms_per_byte == 0);  // never negative
}

TEST_CASE("The end of communication follows from when buckets are ready", "[reducer]") {
  CHECK(predict_end_ms({{10, 100}, {20, 100}}, {1, 0.01}) == Approx(22));
  CHECK(predict_end_ms({{10, 2000}, {20, 100}}, {1, 0.01}) ==
        Approx(33));  // the first is in the way
}

TEST_CASE("The order of gradients is learned once, unused ones go last", "[reducer]") {
  PlanOptions options{kMiB, kMiB};
  Machine machine(parameters_of(4, kMiB), options, false);
  machine.step({1, 0, 1, 3}, [](const auto&) { return 1.0; });
  CHECK(to_json(machine.plan) == "[[1],[0],[3],[2]]");
  CHECK(machine.planner.done());
  machine.step({3, 2, 1, 0}, [](const auto&) { return 1.0; });
  CHECK(to_json(machine.plan) == "[[1],[0],[3],[2]]");
}

TEST_CASE("The fastest bucket size stays", "[reducer]") {
  const size_t best = GENERATE(3, 6, 12, 60);  // buckets of 25, 10 and 5 MiB, and of 1 MiB
  Machine machine(parameters_of(60, kMiB), {}, true);
  const auto span = [&](const BucketPlan& plan) {
    const auto buckets = static_cast<double>(plan.buckets.size());
    return 100 + 5 * std::abs(buckets - static_cast<double>(best));
  };
  while (!machine.planner.done() && machine.steps < 500) {
    machine.step(reversed(60), span);
  }
  REQUIRE(machine.planner.done());
  CAPTURE(machine.planner.report(), machine.steps);
  CHECK(std::abs(static_cast<int>(machine.plan.buckets.size()) - static_cast<int>(best)) <= 1);
  CHECK(machine.steps < 100);
  const auto changes = machine.changes;
  machine.step(reversed(60), span);
  CHECK(machine.changes == changes);
}

TEST_CASE("A plan that is hardly faster does not take the place of the first", "[reducer]") {
  Machine machine(parameters_of(60, kMiB), {}, true);
  const auto before = machine.plan.buckets.size();
  while (!machine.planner.done()) {
    machine.step(reversed(60),
                 [&](const BucketPlan& plan) { return plan.buckets.size() == before ? 100 : 99; });
  }
  CHECK(machine.plan.buckets.size() == before);
}

TEST_CASE("Where all sizes give the same plan nothing is tried", "[reducer]") {
  Machine machine(parameters_of(3, 64), {}, true);
  while (!machine.planner.done() && machine.steps < 100) {
    machine.step(reversed(3), [](const auto&) { return 1.0; });
  }
  CHECK(machine.changes == 0);
  CHECK(machine.steps < 10);
}

}  // namespace test_planner
