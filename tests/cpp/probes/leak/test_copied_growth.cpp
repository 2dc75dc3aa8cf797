#include <brimful/memory/live_table.h>
#include <brimful/probes/leak_finder.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include <functional>
#include <string>
#include <vector>

#include "support/catch.h"
#include "support/tracking.h"

namespace test_copied_growth {

using namespace brimful;
using probes::Holder;
using probes::HolderKind;
using probes::LeakFinder;
using test::Tracking;

namespace {

/// What a program keeps between its steps, and what it does to it in one.
struct Program {
  std::string name;
  std::function<void(at::Tensor& kept, int64_t step)> step;
};

at::Tensor rows(int64_t count) {
  return at::rand({count, 16});
}

const std::vector<Program>& that_grow() {
  static const std::vector<Program> programs{
      {"cat",
       [](at::Tensor& kept, int64_t) {
         kept = at::cat({kept, rows(4)});
       }},
      {"cat in front",
       [](at::Tensor& kept, int64_t) {
         kept = at::cat({rows(4), kept});
       }},
      {"a decayed copy",
       [](at::Tensor& kept, int64_t) {
         kept = at::cat({kept * 0.9, rows(1)});
       }},
      {"of another type and back",
       [](at::Tensor& kept, int64_t) {
         kept = at::cat({kept.to(at::kDouble), rows(4).to(at::kDouble)}).to(at::kFloat);
       }},
      {"row by row",
       [](at::Tensor& kept, int64_t) {
         auto all = kept.unbind();
         for (auto& row : all) {
           row = row.clone();
         }
         all.push_back(rows(1)[0]);
         kept = at::stack(all);
       }},
      {"into a larger one",
       [](at::Tensor& kept, int64_t) {
         auto larger = at::empty({kept.size(0) + 4, 16});
         larger.narrow(0, 0, kept.size(0)).copy_(kept);
         larger.narrow(0, kept.size(0), 4).fill_(1);
         kept = larger;
       }},
      {"resized",
       [](at::Tensor& kept, int64_t) {
         kept.resize_({kept.size(0) + 4, 16});
       }},
      {"given as out",
       [](at::Tensor& kept, int64_t) {
         auto larger = at::empty({0});
         at::cat_out(larger, {kept, rows(4)});
         kept = larger;
       }},
      {"after an operator that fails",
       [](at::Tensor& kept, int64_t) {
         CHECK_THROWS(at::cat({kept, at::rand({3, 5})}));
         kept = at::cat({kept, rows(4)});
       }},
  };
  return programs;
}

const std::vector<Program>& that_do_not() {
  static const std::vector<Program> programs{
      {"a batch by its length",
       [](at::Tensor& kept, int64_t step) { kept = rows(4 * (step + 1)); }},
      {"its activations",
       [](at::Tensor& kept, int64_t step) {
         kept = at::relu(at::matmul(rows(4 * (step + 1)), rows(16).t()));
       }},
      {"what a kept number has changed",
       [](at::Tensor& kept, int64_t step) { kept = rows(4 * (step + 1)) + kept.mean(); }},
      {"what a kept row has changed",
       [](at::Tensor& kept, int64_t step) { kept = rows(4 * (step + 1)) * kept[0]; }},
      {"the same form",
       [](at::Tensor& kept, int64_t step) {
         kept = at::cat({at::zeros_like(kept).slice(0, 0, 1), rows(4 * (step + 1))});
       }},
      {"positions", [](at::Tensor& kept, int64_t step) { kept = at::arange(64 * (step + 1)); }},
      {"an average",
       [](at::Tensor& kept, int64_t) {
         kept = kept * 0.9 + 0.1 * at::rand({1, 16});
       }},
      {"one that shrinks and grows",
       [](at::Tensor& kept, int64_t step) {
         kept = step % 4 == 0 ? rows(4) : at::cat({kept, rows(4)});
       }},
      {"in place", [](at::Tensor& kept, int64_t) { kept.add_(1); }},
  };
  return programs;
}

Holder history() {
  Holder holder;
  holder.kind = HolderKind::variable;
  holder.path = holder.container = "history";
  return holder;
}

void run(const Program& program, LeakFinder& finder, at::Tensor& kept, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    {
      const memory::SiteScope here(program.name);
      program.step(kept, step);
    }
    memory::mark_step();
    finder.check();
  }
}

}  // namespace

TEST_CASE("What is copied whole and grows is a leak, by its place", "[probes]") {
  for (const auto& program : that_grow()) {
    CAPTURE(program.name);
    const Tracking on;
    auto kept = rows(4);
    LeakFinder finder;
    run(program, finder, kept, 0, 11);
    CHECK(finder.leaks().empty());  // without a holder it takes twice as many steps
    run(program, finder, kept, 11, 14);
    REQUIRE(finder.leaks().size() == 1);
    const auto& leak = finder.leaks().front();
    CHECK(leak.copied);
    CHECK(leak.sites == std::vector<std::string>{program.name});
    CHECK(leak.bytes_per_step % 64 == 0);
    CHECK(leak.bytes_per_step > 0);
    CHECK_THAT(to_string(leak), Catch::Contains("is copied whole each time that it grows"));
  }
}

TEST_CASE("What grows by copies has the holder of the newest copy", "[probes]") {
  for (const auto& program : that_grow()) {
    CAPTURE(program.name);
    const Tracking on;
    auto kept = rows(4);
    int searches = 0;
    LeakFinder finder({}, [&](const std::vector<const void*>& data) {
      ++searches;
      CHECK(data == std::vector<const void*>{kept.storage().data()});
      return std::vector<Holder>(data.size(), history());
    });
    run(program, finder, kept, 0, 7);
    CHECK(finder.leaks().empty());
    run(program, finder, kept, 7, 20);
    REQUIRE(finder.leaks().size() == 1);
    CHECK(finder.leaks()[0].filling);
    CHECK(finder.leaks()[0].holder.path == "history");
    CHECK(searches == 1);
    run(program, finder, kept, 20, 40);
    REQUIRE(finder.leaks().size() == 1);
    CHECK_FALSE(finder.leaks()[0].filling);
    CHECK(searches == 2);
  }
}

TEST_CASE("What is larger each step for another reason is no leak", "[probes]") {
  for (const auto& program : that_do_not()) {
    CAPTURE(program.name);
    const Tracking on;
    auto kept = rows(4);
    LeakFinder finder({}, [&](const std::vector<const void*>& data) {
      return std::vector<Holder>(data.size(), history());
    });
    run(program, finder, kept, 0, 40);
    CHECK(finder.leaks().empty());
  }
}

TEST_CASE("What is copied until it is full was filling", "[probes]") {
  const Tracking on;
  auto kept = rows(4);
  LeakFinder finder({}, [&](const std::vector<const void*>& data) {
    return std::vector<Holder>(data.size(), history());
  });
  const Program window{"window", [](at::Tensor& tensor, int64_t) {
                         tensor = at::cat({tensor, rows(4)}).slice(0, -48).clone();
                       }};
  run(window, finder, kept, 0, 10);
  REQUIRE(finder.leaks().size() == 1);
  CHECK(finder.leaks()[0].filling);
  run(window, finder, kept, 10, 40);
  CHECK(finder.leaks().empty());
}

TEST_CASE("Growth by every third step is seen to be copied", "[probes]") {
  const Tracking on;
  auto kept = rows(4);
  LeakFinder finder({}, [&](const std::vector<const void*>& data) {
    return std::vector<Holder>(data.size(), history());
  });
  const Program third{"third", [](at::Tensor& tensor, int64_t step) {
                        tensor = step % 3 == 0 ? at::cat({tensor, rows(4)}) : tensor;
                      }};
  run(third, finder, kept, 0, 30);
  REQUIRE(finder.leaks().size() == 1);
  CHECK(finder.leaks()[0].bytes_per_step == 256);  // of those in which it grows
}

TEST_CASE("One finder at a time follows copies, and the next one after it", "[probes]") {
  const Tracking on;
  const auto& cat = that_grow().front();
  const auto search = [](const std::vector<const void*>& data) {
    return std::vector<Holder>(data.size(), history());
  };
  auto kept = rows(4);
  LeakFinder second({}, search);
  {
    LeakFinder first({}, search);
    for (int64_t step = 0; step < 7; ++step) {
      run(cat, first, kept, step, step + 1);
      second.check();
    }
    CHECK(second.leaks().empty());
  }
  run(cat, second, kept, 7, 20);
  CHECK(second.leaks().size() == 1);
}

TEST_CASE("Operators are followed while it may decide, until the finder rests or ends",
          "[probes]") {
  const Tracking on;
  const auto& cat = that_grow().front();
  auto kept = rows(4);
  {
    LeakFinder finder;
    run(cat, finder, kept, 0, 4);
    CHECK_FALSE(at::hasGlobalCallbacks());
    run(cat, finder, kept, 4, 6);
    CHECK(at::hasGlobalCallbacks());
    finder.rest();
    CHECK_FALSE(at::hasGlobalCallbacks());
    run(cat, finder, kept, 6, 7);
    CHECK(at::hasGlobalCallbacks());
    run(cat, finder, kept, 7, 20);
    CHECK_FALSE(at::hasGlobalCallbacks());
    CHECK(finder.leaks().size() == 1);
  }
  auto other = rows(4);
  {
    LeakFinder finder;
    const Program batch{"batch", that_do_not().front().step};
    int64_t followed = 0;
    for (int64_t step = 20; step < 320; ++step) {
      run(batch, finder, other, step, step + 1);
      followed += at::hasGlobalCallbacks() ? 1 : 0;
    }
    CHECK(followed > 1);  // what does not copy is asked ever more seldom
    CHECK(followed < 8);
    run(cat, finder, kept, 320, 326);
    CHECK(at::hasGlobalCallbacks());
  }
  CHECK_FALSE(at::hasGlobalCallbacks());
}

}  // namespace test_copied_growth
