#include "support/catch.h"

#include "ladder/choose.h"
#include "ladder/plan_peak.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace test_plan_peak {

using namespace brimful;
using namespace brimful::ladder;

namespace {
/// A chain of modules, each of which takes its input, saves `saved` bytes of its own and makes an output of 10 bytes; its
/// backward takes 5 bytes for a while.
struct Chain {
  StepEvents step;

  explicit Chain(const std::vector<int64_t>& saved, double forward_ms = 1) {
    int64_t input = take(10);
    std::vector<int64_t> outputs;
    for (size_t i = 0; i < saved.size(); ++i) {
      StepEvents::Call call;
      call.module = static_cast<int32_t>(i);
      call.entered_at = step.size++;
      call.forward_ms = forward_ms;
      call.arguments = {input};
      const auto place = std::ssize(step.calls);
      const auto own = take(saved[i]);
      const auto output = take(10);
      save(own, place);
      save(output, place);
      give_back(own);
      call.left_at = step.size++;
      step.calls.push_back(call);
      give_back(input);
      input = output;
    }
    give_back(input);
    for (size_t i = saved.size(); i-- > 0;) {
      auto& own = step.saves[2 * i];
      auto& output = step.saves[2 * i + 1];
      output.used_at = step.size++;
      own.used_at = step.size++;
      const auto gradient = take(5);
      give_back(gradient);
      own.dropped_at = step.size++;
      output.dropped_at = step.size++;
    }
  }

  int64_t take(int64_t bytes) {
    step.blocks.push_back({bytes, step.size++, kNever});
    return std::ssize(step.blocks) - 1;
  }
  void give_back(int64_t block) {
    step.blocks[static_cast<size_t>(block)].given_back_at = step.size++;
  }
  void save(int64_t block, int64_t call) {
    StepEvents::Save save;
    save.block = block;
    save.call = call;
    save.saved_at = step.size++;
    step.saves.push_back(save);
  }
};

constexpr int64_t kGenerator = 5056;  // kept for each recomputed call, and three more while it runs
}  // namespace

TEST_CASE("A step without rungs holds what it saves until its backward has used it", "[ladder]") {
  const Chain chain({1000, 2000, 3000});
  // All saved blocks and outputs, and a gradient.
  CHECK(cost_of(chain.step, {}).peak_bytes == 6000 + 30 + 5);
  CHECK(cost_of(chain.step, {}).more_ms == 0);
}

TEST_CASE("What an allocator is asked for is what the plan holds", "[ladder]") {
  Chain chain({100000, 200000, 300000});
  chain.step.brought_back = GENERATE(false, true);
  Rungs everything;
  everything.everything = true;
  for (const auto& rungs : {Rungs{}, Rungs{{0}, {}}, Rungs{{1, 2}, {}}, Rungs{{0}, {2}},
                            Rungs{{}, {0, 1}}, everything}) {
    std::unordered_map<uint64_t, int64_t> live;
    int64_t used = 0;
    int64_t peak = 0;
    for (const auto& request : requests_of(chain.step, rungs, {}, 7)) {
      CHECK(request.stream == 7);
      if (request.kind == brimful::memory::CachingRequest::Kind::take) {
        CHECK(live.emplace(request.block, request.bytes).second);
        peak = std::max(peak, used += request.bytes);
      } else {
        used -= live.at(request.block);
        live.erase(request.block);
      }
    }
    CHECK(peak == cost_of(chain.step, rungs).peak_bytes);
    CHECK(used == 0);
  }
}

TEST_CASE("Rungs that an allocator has no room for are not chosen", "[ladder]") {
  const auto count = GENERATE(3, 40);
  const Chain chain(std::vector<int64_t>(static_cast<size_t>(count), 100000));
  const std::vector<bool> yes(static_cast<size_t>(count), true);
  const std::vector<bool> no(static_cast<size_t>(count), false);
  const auto two = [](const Rungs& rungs) { return rungs.recomputed.size() >= 2; };
  const auto chosen = cheapest(chain.step, {yes, no}, 1 << 30, two);
  REQUIRE(chosen);
  CHECK(chosen->rungs.recomputed.size() >= 2);
  CHECK_FALSE(cheapest(chain.step, {yes, no}, 1 << 30, [](const Rungs&) { return false; }));
}

TEST_CASE("Everything offloaded leaves what modules take meanwhile", "[ladder]") {
  Rungs everything;
  everything.everything = true;
  auto chain = Chain({1000, 2000, 3000});
  CHECK(cost_of(chain.step, everything).peak_bytes == 10 + 3000 + 10);
  chain.step.brought_back = true;  // one module's at a time, as in forward
  CHECK(cost_of(chain.step, everything).peak_bytes == 10 + 3000 + 10);
}

TEST_CASE("What is offloaded comes back while what lies behind it is used", "[ladder]") {
  auto chain = Chain({100000, 200000, 300000});
  const auto aside = cost_of(chain.step, {{}, {0, 1, 2}}).peak_bytes;
  CHECK(aside == 10 + 300000 + 10);
  chain.step.brought_back = true;
  Rungs rungs{{}, {0, 1, 2}};
  CHECK(cost_of(chain.step, rungs).peak_bytes <= 300000 + 40);
  rungs.ahead = true;
  const auto peak = cost_of(chain.step, rungs).peak_bytes;
  CHECK(peak >= 500000);
  CHECK(peak <= 500000 + 40);
}

TEST_CASE("A recomputed module saves nothing but its input until its backward", "[ladder]") {
  const Chain chain({100000, 200000, 300000}, 2.0);
  const auto cost = cost_of(chain.step, {{0, 1}, {}});
  // In the third one's forward: its own, the first input and three outputs, two states.
  CHECK(cost.peak_bytes == 300000 + 40 + 2 * kGenerator);
  CHECK(cost.more_ms == Approx(2 * (2.0 + kCallMs)));
  const auto all = cost_of(chain.step, {{0, 1, 2}, {}});
  // In its backward the third one runs again: its own, its output, and three more states.
  CHECK(all.peak_bytes == 300000 + 40 + (3 + 3) * kGenerator);
}

TEST_CASE("An offloaded module costs its bytes there and back", "[ladder]") {
  Chain chain({100000, 200000});
  chain.step.offload_ms_per_byte = 1e-3;
  const auto cost = cost_of(chain.step, {{}, {1}});
  CHECK(cost.more_ms == Approx(200.01));
  CHECK(cost.peak_bytes ==
        100000 + 10 + 200000 + 10);  // while the second one's forward has its own
}

TEST_CASE("The cheapest rungs that fit are found, by trying all or by a program", "[ladder]") {
  const auto count = GENERATE(3, 40);
  std::vector<int64_t> saved(static_cast<size_t>(count), 100000);
  Chain chain(saved);
  for (size_t i = 0; i < chain.step.calls.size(); ++i) {
    chain.step.calls[i].forward_ms = i % 2 == 0 ? 1 : 100;  // every other one is dear
  }
  const std::vector<bool> yes(static_cast<size_t>(count), true);
  const std::vector<bool> no(static_cast<size_t>(count), false);
  const auto all = cost_of(chain.step, {}).peak_bytes;
  CHECK(cheapest(chain.step, {yes, no}, all)->rungs.empty());
  const auto fewer = cheapest(chain.step, {yes, no}, all - 90000);
  REQUIRE(fewer);
  CHECK(fewer->cost.peak_bytes <= all - 90000);
  CHECK(fewer->rungs.recomputed.size() == 1);
  CHECK(fewer->rungs.recomputed[0] % 2 == 0);
  CHECK_FALSE(cheapest(chain.step, {yes, no}, 90000));   // not one module's
  CHECK_FALSE(cheapest(chain.step, {no, no}, all - 1));  // nothing is allowed
  const auto half = cheapest(chain.step, {yes, no}, (count / 2 + 2) * int64_t{100000});
  REQUIRE(half);
  CHECK(half->cost.more_ms < count);  // no dear one
}

TEST_CASE("What is allowed alone is chosen", "[ladder]") {
  Chain chain({100000, 100000, 100000});
  chain.step.offload_ms_per_byte = 1;  // far dearer than a recomputation
  const auto room = cost_of(chain.step, {}).peak_bytes - 1;
  const auto choice = cheapest(chain.step, {{false, false, false}, {true, false, true}}, room);
  REQUIRE(choice);
  CHECK(choice->rungs.recomputed.empty());
  CHECK(choice->rungs.offloaded.size() == 1);
  CHECK(choice->rungs.offloaded[0] != 1);
}

TEST_CASE("On a device a plan fetches ahead where there is room for that", "[ladder]") {
  Chain chain({100000, 100000, 100000});
  chain.step.brought_back = true;
  const std::vector<bool> yes(3, true);
  const std::vector<bool> no(3, false);
  const auto wide = cheapest(chain.step, {no, yes}, 240000);
  REQUIRE(wide);
  CHECK(wide->rungs.ahead);
  const auto narrow = cheapest(chain.step, {no, yes}, 140000);
  REQUIRE(narrow);
  CHECK_FALSE(narrow->rungs.ahead);
  CHECK_FALSE(cheapest(chain.step, {no, yes}, 90000));
  chain.step.brought_back = false;
  CHECK_FALSE(cheapest(chain.step, {no, yes}, 240000)->rungs.ahead);
}

}  // namespace test_plan_peak
