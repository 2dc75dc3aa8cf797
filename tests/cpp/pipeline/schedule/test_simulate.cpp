#include "support/catch.h"

#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>
#include <brimful/pipeline/simulate.h>
#include <c10/util/Exception.h>

#include <limits>
#include <numeric>

namespace test_simulate {

using namespace brimful::pipeline;
using Catch::Contains;
using Values = std::vector<double>;

namespace {
struct Times {
  double forward, input, weight;
  double all() const { return forward + input + weight; }
  Costs costs() const {
    Costs costs;
    costs.forward = {forward};
    costs.backward_input = {input};
    costs.backward_weight = {weight};
    return costs;
  }
};
const std::vector<Times> kTimes{{1, 1, 1}, {2, 3, 2}, {5, 4, 3}, {1, 2, 1}, {18, 18, 9}};

template <typename Test>
void for_each_size(const Test& test) {
  for (const auto& times : kTimes) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int microbatches = 1; microbatches <= 20; ++microbatches) {
        INFO(ranks << " ranks, " << microbatches << " microbatches, F " << times.forward << ", I "
                   << times.input << ", W " << times.weight);
        test(times, ranks, microbatches);
      }
    }
  }
}

Values falling(int from, int count, int most) {
  Values values;
  for (int i = 0; i < count; ++i) {
    values.push_back(std::min(from - i, most));
  }
  return values;
}
}  // namespace

TEST_CASE("GPipe and 1F1B take (m + p - 1) times a microbatch", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    for (const auto& schedule : {gpipe(p, m), one_forward_one_backward(p, m)}) {
      const auto timeline = simulate(schedule, times.costs());
      CHECK(timeline.makespan == (m + p - 1) * times.all());
      CHECK(timeline.busy == Values(p, m * times.all()));
      CHECK(timeline.bubble() == Approx((p - 1.0) / (m + p - 1)).margin(1e-12));
      CHECK(timeline.bubble(0) == timeline.bubble(p - 1));
      const bool keeps_all = schedule.name == "gpipe";
      CHECK(timeline.peak_live == (keeps_all ? Values(p, m) : falling(p, p, m)));
      CHECK(timeline.peak_bytes == timeline.peak_live);
    }
  });
}

TEST_CASE("Interleaving divides the bubble by the stages a rank has", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    for (int v = 1; v <= 4 && m % p == 0; ++v) {
      for (const auto& schedule : {interleaved_1f1b(p, v, m), looped_bfs(p, v, m)}) {
        const auto timeline =
            simulate(schedule, times.costs());  // of a stage: a rank takes v times that
        CHECK(timeline.makespan == (m * v + p - 1) * times.all());
        CHECK(timeline.bubble() == Approx((p - 1.0) / (v * m + p - 1)).margin(1e-12));
      }
      // Narayanan et al.: p * (1 + (p - 1) / (p v)) microbatches through all stages of a rank.
      const double most = simulate(interleaved_1f1b(p, v, m), times.costs()).peak_bytes[0] / v;
      const double limit = p * (1 + (p - 1.0) / (p * v));
      CHECK(most <= limit + 1e-12);
      CHECK((most == Approx(limit) || m < 2 * p));
    }
  });
}

TEST_CASE("Zero-bubble schedules have the bubbles of their paper", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    const auto [f, i, w] = times;
    const auto h1 = simulate(zb_h1(p, 1, m), times.costs());
    if (m >= p && w <= i) {
      CHECK(h1.makespan == m * times.all() + (p - 1) * (f + i - w));
    }
    CHECK(h1.peak_live == Values(p, std::min(p, m)));
    const auto h2 = simulate(zb_h2(p, m), times.costs());
    if (m >= 2 * p - 1) {
      CHECK(h2.period == m * times.all() + (p - 1) * std::max(0.0, f + i - 2 * w));
    }
    CHECK(h2.peak_live == Values(p, std::min(2 * p - 1, m)));
    const auto v = simulate(zbv(p, m), times.costs());
    if (m >= 2 * p - 1 && f == i && i == w) {
      CHECK(v.period == 2 * m * times.all());
      CHECK(v.peak_bytes == Values(p, 2 * p));  // of two stages a rank: p microbatches
    }
  });
}

TEST_CASE("DualPipeV has no larger a bubble than its authors say", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    if (m < 2 * p) {
      return;
    }
    const auto timeline = simulate(dualpipev(p, m), times.costs());
    const double whole = times.input + times.weight;
    const double bubble = (p - 1) * (times.forward + 2 * whole - 3 * times.weight);
    CHECK(timeline.makespan <= 2 * m * times.all() + bubble);
    CHECK(timeline.peak_bytes == Values(p, 2 * p + 1));
  });
}

TEST_CASE("Inference fills once and keeps nothing", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    for (int v = 1; v <= 4; ++v) {
      const auto timeline = simulate(forward_only(p, v, m), times.costs());
      if (m >= p || v == 1) {
        CHECK(timeline.makespan == (m * v + p - 1) * times.forward);
      }
      CHECK(timeline.peak_live == Values(p * v, 1));
    }
  });
}

TEST_CASE("Stages that differ and hops that show take their time", "[pipeline]") {
  Costs costs;
  costs.forward = {1, 5, 2};
  costs.backward_input = {2, 1, 1};
  costs.backward_weight = {1, 3, 1};
  const int m = 7;
  // A flow shop of equal jobs: all stages once, and the slowest for the others; forwards, then backwards.
  CHECK(simulate(gpipe(3, m), costs).makespan == 8 + (m - 1) * 5 + 9 + (m - 1) * 4);
  costs.backward = {6, 4, 2};
  CHECK(simulate(gpipe(3, m), costs).makespan == 8 + (m - 1) * 5 + 12 + (m - 1) * 6);
  CHECK(simulate(zb_h1(3, 1, m), costs).busy == Values{m * 4.0, m * 9.0, m * 4.0});
  costs.hop = 0.25;
  const auto shown = simulate(gpipe(3, m), costs);
  CHECK(shown.makespan == 8 + (m - 1) * 5 + 12 + (m - 1) * 6 + 4 * 0.25);
  CHECK(simulate(gpipe(1, m), {{1}, {1}, {1}, {}, 100}).makespan == 3 * m);
}

TEST_CASE("Each action has its time", "[pipeline]") {
  Costs costs;
  costs.forward = {2};
  costs.hop = 1;
  const auto check_rank = [](const Timeline& timeline, int rank, const std::string& expected) {
    std::string text;
    for (const auto& [action, start, end] : timeline.ranks[rank]) {
      text += to_string(action) + "[" + std::to_string(static_cast<int>(start)) + "," +
              std::to_string(static_cast<int>(end)) + "] ";
    }
    CHECK(text == expected);
  };
  const auto schedule = one_forward_one_backward(2, 2);
  const auto timeline = simulate(schedule, costs);
  check_rank(timeline, 0, "0F0[0,2] 0F1[2,4] 0B0[8,10] 0B1[12,14] ");
  check_rank(timeline, 1, "1F0[3,5] 1B0[5,7] 1F1[7,9] 1B1[9,11] ");
  CHECK(timeline.period == 14);
  const auto complete = simulate(with_communication(schedule), costs);
  check_rank(complete, 1,
             "1RECV_F0[0,3] 1F0[3,5] 1B0[5,7] 1SEND_B0[7,7] 1RECV_F1[7,7] 1F1[7,9] 1B1[9,11] "
             "1SEND_B1[11,11] ");
  CHECK(complete.busy == Values{8, 8});
}

TEST_CASE("Receives before their use cost no time", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    for (const auto* name : {"1f1b", "interleaved_1f1b", "zbv", "dualpipev"}) {
      const int v = name == std::string("1f1b") ? 1 : 2;
      auto costs = times.costs();
      costs.hop = 0.5;
      const auto schedule = make_schedule(name, p, v, m);
      CHECK(simulate(schedule, costs).makespan ==
            simulate(with_communication(schedule), costs).makespan);
    }
  });
}

TEST_CASE("Receives that are posted early cost no time either", "[pipeline]") {
  for_each_size([](const Times& times, int p, int m) {
    auto costs = times.costs();
    costs.hop = 0.5;
    for (const auto& schedule : {one_forward_one_backward(p, m), zbv(p, m)}) {
      const auto early = with_communication(schedule, ReceivePlace::when_sent);
      costs.receives_wait = false;
      CHECK(simulate(early, costs).makespan == simulate(schedule, costs).makespan);
      costs.receives_wait = true;
      CHECK(simulate(early, costs).makespan >= simulate(schedule, costs).makespan);
    }
  });
  CHECK(simulate(with_communication(one_forward_one_backward(2, 4), ReceivePlace::when_sent))
            .makespan == 19);
}

TEST_CASE("What I frees counts", "[pipeline]") {
  Costs costs;
  costs.activation = {10, 30};
  CHECK(simulate(zb_h1(2, 1, 4), costs).peak_live == Values{2, 2});
  CHECK(simulate(zb_h1(2, 1, 4), costs).peak_bytes == Values{20, 60});
  costs.input_share = 0.5;
  CHECK(simulate(zb_h1(2, 1, 4), costs).peak_live == Values{2, 1.5});
  CHECK(simulate(zb_h1(2, 1, 4), costs).peak_bytes == Values{20, 45});
  const auto alone = from_csv("0F0,0I0,0W0,0F1,0F2,0I1,0W1,0I2,0W2");
  CHECK(simulate(alone, {{1}, {1}, {1}, {}, 0, {1}, 0.5}).peak_live == Values{2});
  costs.activation = {1, 10, 100, 1000};
  CHECK(simulate(zbv(2, 4), costs).peak_bytes[0] == 1003);
}

TEST_CASE("Costs that make no sense are refused", "[pipeline]") {
  const auto schedule = gpipe(3, 2);
  const auto simulated = [&](const auto& change) {
    Costs costs;
    change(costs);
    return simulate(schedule, costs);
  };
  CHECK_THROWS_AS(simulated([](Costs& costs) { costs.forward = {1, 2}; }), c10::ValueError);
  CHECK_THROWS_WITH(simulated([](Costs& costs) {
                      costs.forward = {1, 2};
                    }),
                    Contains("one value, or one for each stage (forward: 2 values, stages: 3)"));
  CHECK_THROWS_WITH(simulated([](Costs& costs) { costs.backward_input = {}; }),
                    Contains("(backward_input: 0 values, stages: 3)"));
  CHECK_THROWS_WITH(simulated([](Costs& costs) {
                      costs.backward = {1, -2, 3};
                    }),
                    Contains("a cost must be finite and not negative (backward: -2)"));
  CHECK_THROWS_WITH(
      simulated([](Costs& c) { c.activation = {std::numeric_limits<double>::infinity()}; }),
      Contains("(activation: inf)"));
  CHECK_THROWS_WITH(simulated([](Costs& costs) { costs.hop = -1; }), Contains("(hop: -1)"));
  CHECK_THROWS_WITH(simulated([](Costs& costs) { costs.input_share = 1.5; }),
                    Contains("(input_share: 1.5)"));
  CHECK_THROWS_WITH(simulate(from_csv("0F0,0B0\n1B0,1F0")), Contains("1B0 (rank 1, action 0)"));
}

}  // namespace test_simulate
