#include <brimful/probes/leak.h>

#include <c10/util/Exception.h>

#include "support/catch.h"

namespace test_leak {

using namespace brimful::probes;
using brimful::memory::LiveBlock;

namespace {

std::vector<LiveBlock> one_a_step(uint32_t site, int64_t first, int64_t last, int64_t bytes = 8) {
  std::vector<LiveBlock> blocks;
  for (int64_t step = first; step <= last; ++step) {
    LiveBlock block;
    block.bytes = bytes;
    block.step = step;
    block.site = site;
    blocks.push_back(block);
  }
  return blocks;
}

std::vector<LiveBlock> operator+(std::vector<LiveBlock> a, const std::vector<LiveBlock>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("A line grows when each of the last complete steps has left blocks", "[probes]") {
  const auto found = growing(one_a_step(1, 2, 8), 8);
  REQUIRE(found.size() == 1);
  CHECK(found[0].site == 1);
  CHECK(found[0].first_step == 2);
  CHECK(found[0].steps == 5);  // 2 to 6: the last two do not count
  CHECK(found[0].bytes == 40);
}

TEST_CASE("Warm-up, gaps, and what stopped are no growth", "[probes]") {
  CHECK(growing(one_a_step(1, 2, 8), 7).empty());
  CHECK(growing(one_a_step(1, 0, 1), 8).empty());
  CHECK(growing(one_a_step(1, 2, 5), 8).empty());
  CHECK(growing(one_a_step(1, 2, 4) + one_a_step(1, 6, 8), 10).empty());
  CHECK(growing({}, 100).empty());
}

TEST_CASE("A line grows by every second, fifth or tenth step as well", "[probes]") {
  const auto every = [](int64_t period, int64_t count) {
    std::vector<LiveBlock> blocks;
    for (int64_t i = 0; i < count; ++i) {
      blocks = blocks + one_a_step(1, 10 + i * period, 10 + i * period);
    }
    return blocks;
  };
  for (const int64_t period : {2, 5, 10}) {
    CAPTURE(period);
    const int64_t newest = 10 + 4 * period;
    CHECK(growing(every(period, 4), newest + 2).empty());
    for (const int64_t since : {int64_t{0}, period - 1}) {
      const auto found = growing(every(period, 5), newest + 2 + since);
      REQUIRE(found.size() == 1);
      CHECK(found[0].period == period);
      CHECK(found[0].steps == 5);
      CHECK(found[0].first_step == 10);
      CHECK(found[0].bytes == 40);
    }
    CHECK(growing(every(period, 5), newest + 2 + period).empty());  // the next is overdue
    CHECK(growing(every(period, 5), newest + 1).empty());           // which may rightly be held
  }
  // The last part of an epoch is shorter: 5, 5, 3.
  const auto uneven = one_a_step(1, 5, 5) + one_a_step(1, 10, 10) + one_a_step(1, 13, 13) +
                      one_a_step(1, 18, 18) + one_a_step(1, 23, 23);
  CHECK(growing(uneven, 25).size() == 1);
  CHECK(growing(uneven + one_a_step(1, 33, 33), 35).empty());  // twice as long as another
}

TEST_CASE("What fills ever more slowly is known by its halves", "[probes]") {
  auto blocks = one_a_step(1, 2, 9);
  CHECK_FALSE(growing(blocks, 11).at(0).slowing);
  blocks = one_a_step(1, 2, 6);
  for (int64_t step = 30; step <= 70; step += 10) {
    blocks = blocks + one_a_step(1, step, step);
  }
  const auto found = growing(blocks, 72);
  REQUIRE(found.size() == 1);
  CHECK(found[0].steps == 5);
  CHECK(found[0].all_steps == 10);
  CHECK(found[0].slowing);
}

TEST_CASE("The line with the most bytes comes first", "[probes]") {
  const auto found = growing(one_a_step(1, 2, 9) + one_a_step(2, 2, 9, 16), 9);
  REQUIRE(found.size() == 2);
  CHECK(found[0].site == 2);
}

TEST_CASE("Growth over less than two steps is an error", "[probes]") {
  CHECK_THROWS_AS(growing({}, 0, {1, 2}), c10::ValueError);
  CHECK_THROWS_AS(growing({}, 0, {5, -1}), c10::ValueError);
}

TEST_CASE("A leak's text names holder, line, node and remedy", "[probes]") {
  Leak leak;
  leak.holder.kind = HolderKind::variable;
  leak.holder.path = leak.holder.container = "total";
  leak.holder.root = "global of train";
  leak.holder.node = "AddBackward0";
  leak.holder.scalar = leak.holder.has_graph = true;
  leak.sites = {"train.py:31 (<module>)"};
  leak.steps = 5;
  leak.bytes_per_step = 2048;
  CHECK(to_string(leak) ==
        "`total` (train.py:31 (<module>); global of train) keeps 5 graphs alive through "
        "AddBackward0, "
        "2.0 KiB a step; use total += loss.item()");
  leak.evaluation = true;
  CHECK(to_string(leak).ends_with("run it under torch.no_grad()"));
  leak.evaluation = false;
  leak.retained = true;
  CHECK(to_string(leak).ends_with("loss.item()"));  // its nodes alone: no backward has kept them
  leak.bytes = 4096;
  CHECK(to_string(leak).find("call backward() without retain_graph=True") != std::string::npos);
  const auto through = leak.holder.node;
  leak.holder.node = "";  // whose own graph it is not known
  leak.holder.has_graph = true;
  CHECK(to_string(leak).find("retain_graph") == std::string::npos);
  leak.holder.node = through;
  leak.retained = false;
  CHECK(to_string(leak).find("retain_graph") == std::string::npos);
  leak.holder.is_gradient = true;  // a backward() with create_graph=True has made it
  leak.evaluation = true;
  CHECK(to_string(leak).ends_with("graphs that hold each other"));
}

TEST_CASE("Advice speaks of a graph only where there is one", "[probes]") {
  struct Case {
    HolderKind kind;
    bool has_graph;
    bool linked;
    bool copied;
    std::string advice;
  };
  const std::vector<Case> cases{
      {HolderKind::variable, false, false, false, "bound what `a.b` keeps"},
      {HolderKind::variable, false, false, true, "bound what `a.b` keeps"},
      {HolderKind::attribute, true, false, false, "a.b = a.b.detach()"},
      {HolderKind::attribute, true, false, true, "put a.b.detach() into it; bound what `a.b`"},
      {HolderKind::attribute, false, true, false, "cut the chain that begins at `a`"},
      {HolderKind::sequence, false, true, false, "cut the chain that begins at `a`"},
      {HolderKind::mapping, true, true, false, "the one before it, and its graph"},
      {HolderKind::sequence, true, false, false, "put tensor.detach() into `a`"},
      {HolderKind::sequence, false, false, false, "bound `a` (it grows by its items)"},
      {HolderKind::closure, false, false, false, "make a new closure each step"},
      {HolderKind::closure, true, false, false, "or detach them"},
      {HolderKind::hook, false, false, false, "or let it keep what the last step made alone"},
      {HolderKind::hook, true, false, false, "let it keep tensor.detach()"},
  };
  for (const auto& [kind, has_graph, linked, copied, expected] : cases) {
    CAPTURE(expected);
    Leak leak;
    leak.holder.kind = kind;
    leak.holder.path = "a.b";
    leak.holder.container = "a";
    leak.holder.has_graph = has_graph;
    leak.holder.linked = linked;
    leak.copied = copied;
    CHECK_THAT(advice(leak), Catch::Contains(expected));
    CHECK((advice(leak).find("detach") == std::string::npos || has_graph));
  }
}

}  // namespace test_leak
