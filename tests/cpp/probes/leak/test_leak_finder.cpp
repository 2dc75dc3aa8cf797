#include <brimful/memory/live_table.h>
#include <brimful/probes/leak_finder.h>

#include <ATen/ops/empty.h>

#include <array>
#include <mutex>

#include "memory/tracker.h"
#include "support/catch.h"
#include "support/tracking.h"

namespace test_leak_finder {

using namespace brimful;
using probes::Holder;
using probes::HolderKind;
using probes::LeakFinder;
using test::Tracking;

namespace {

void step(std::vector<at::Tensor>& kept, LeakFinder& finder) {
  {
    const memory::SiteScope here("features");
    kept.push_back(at::empty({16}));
  }
  memory::mark_step();
  finder.check();
}

Holder named(HolderKind kind, bool bounded = false) {
  Holder holder;
  holder.kind = kind;
  holder.path = holder.container = "kept";
  holder.bounded = bounded;
  return holder;
}

}  // namespace

TEST_CASE("A C++ program learns which of its places grows, and how fast", "[probes]") {
  const Tracking on;
  std::vector<at::Tensor> kept;
  LeakFinder finder;
  for (int i = 0; i < 12; ++i) {
    step(kept, finder);
  }
  CHECK(finder.leaks().empty());  // without a holder it takes twice as many steps
  for (int i = 0; i < 6; ++i) {
    step(kept, finder);
  }
  REQUIRE(finder.leaks().size() == 1);
  CHECK(finder.leaks()[0].sites == std::vector<std::string>{"features"});
  CHECK(finder.leaks()[0].bytes_per_step == 64);
}

TEST_CASE("What grows on another device is found too", "[probes]") {
  const Tracking on;
  auto& table = memory::blocks_of({c10::DeviceType::CUDA, 0});
  {
    const std::lock_guard lock(table.mutex());
    table.start(1, 0, nullptr);
  }
  constexpr uint32_t kSteps = 18;
  const std::array<char, kSteps> places{};
  LeakFinder finder;
  for (uint32_t i = 0; i < kSteps; ++i) {
    {
      memory::Moment moment;
      moment.step = i;
      moment.site = memory::site_id({"", 0, "features"});
      const std::lock_guard lock(table.mutex());
      table.born(moment, 512, 512 * (i + 1), &places[i]);
    }
    memory::mark_step();
    finder.check();
  }
  REQUIRE(finder.leaks().size() == 1);
  CHECK(finder.leaks()[0].bytes_per_step == 512);
}

TEST_CASE("A holder is asked for once, and named once", "[probes]") {
  const Tracking on;
  std::vector<at::Tensor> kept;
  int searches = 0;
  LeakFinder finder({}, [&](const std::vector<const void*>& data) {
    ++searches;
    REQUIRE(data.size() == 5);
    CHECK(data[0] == kept[2].storage().data());
    return std::vector<Holder>(data.size(), named(HolderKind::sequence));
  });
  for (int i = 0; i < 20; ++i) {
    step(kept, finder);
  }
  CHECK(searches == 1);
  CHECK(finder.leaks().size() == 1);
}

TEST_CASE("What stops growing by itself is no leak", "[probes]") {
  const Tracking on;
  std::vector<at::Tensor> kept;
  LeakFinder finder({}, [&](const std::vector<const void*>& data) {
    return std::vector<Holder>(data.size(), named(HolderKind::sequence, true));
  });
  for (int i = 0; i < 20; ++i) {
    step(kept, finder);
  }
  CHECK(finder.leaks().empty());
}

TEST_CASE("A window of the newest tensors is no leak", "[probes]") {
  const Tracking on;
  std::vector<at::Tensor> kept;
  LeakFinder finder({}, [&](const std::vector<const void*>& data) {
    return std::vector<Holder>(data.size(), named(HolderKind::sequence));
  });
  for (int i = 0; i < 30; ++i) {
    if (kept.size() == 6) {
      kept.erase(kept.begin());
    }
    step(kept, finder);
    CHECK(finder.leaks().empty());
  }
  for (int i = 0; i < 12; ++i) {  // it is no window any more
    step(kept, finder);
  }
  CHECK(finder.leaks().size() == 1);
}

TEST_CASE("What may be a cache is reported as one that fills, until it is full or surely a leak",
          "[probes]") {
  const Tracking on;
  std::vector<at::Tensor> kept;
  Holder holder = named(HolderKind::mapping);
  LeakFinder finder({}, [&](const std::vector<const void*>& data) {
    return std::vector<Holder>(data.size(), holder);
  });
  std::vector<probes::Leak> told;
  const auto run = [&](int steps, bool fills) {
    for (int i = 0; i < steps; ++i) {
      if (fills) {
        const memory::SiteScope here("masks");
        kept.push_back(at::empty({16}));
      }
      memory::mark_step();
      const auto found = finder.check();
      told.insert(told.end(), found.begin(), found.end());
    }
  };
  SECTION("it goes on") {
    run(20, true);
    REQUIRE(told.size() == 1);
    CHECK(told[0].filling);
    CHECK_THAT(to_string(told[0]), Catch::Contains("may still be filling"));
    CHECK(finder.leaks().size() == 1);
    run(10, true);
    REQUIRE(told.size() == 2);
    CHECK_FALSE(told[1].filling);
    CHECK(told[1].steps == 25);
    REQUIRE(finder.leaks().size() == 1);
    CHECK_FALSE(finder.leaks()[0].filling);
    run(30, true);
    CHECK(told.size() == 2);
  }
  SECTION("it is full") {
    run(20, true);
    run(10, false);
    CHECK(told.size() == 1);
    CHECK(finder.leaks().empty());
  }
  SECTION("a graph is kept, which no cache is for") {
    holder.has_graph = true;
    run(12, true);
    REQUIRE(told.size() == 1);
    CHECK_FALSE(told[0].filling);
  }
}

TEST_CASE("Links of a chain are known by the ways to them", "[probes]") {
  struct Case {
    std::vector<std::string> paths;  // the oldest first; none: too deep to be found
    std::string container;
    std::string path;
  };
  const std::vector<Case> cases{
      {{"a.p.p.p.p.p.v", "a.p.p.p.p.v", "a.p.p.p.v", "a.p.p.v", "a.p.v"}, "a", "a.p.p.p.p.p.v"},
      {{"", "", "a[1][1][1][0]", "a[1][1][0]", "a[1][0]"}, "a", "a[1][1][1][0]"},
      {{"s['x'].n.o.n.o.n.o.n.o.n.o[0]", "s['x'].n.o.n.o.n.o.n.o[0]", "s['x'].n.o.n.o.n.o[0]",
        "s['x'].n.o.n.o[0]", "s['x'].n.o[0]"},
       "s['x']",
       "s['x'].n.o.n.o.n.o.n.o.n.o[0]"},
      {{"k[0][0][0]", "k[1][0][0]", "k[2][0][0]", "k[3][0][0]", "k[4][0][0]"}, "", "k[0][0][0]"},
      {{"k[11]", "k[10]", "k[9]", "k[8]", "k[7]"}, "", "k[11]"},
      {{"k[0].a", "k[1]", "k[2].a", "k[3]", "k[4].a"}, "", "k[0].a"},
  };
  for (const auto& [paths, container, path] : cases) {
    CAPTURE(path);
    const Tracking on;
    std::vector<at::Tensor> kept;
    LeakFinder finder({}, [paths = paths](const std::vector<const void*>& data) {
      std::vector<Holder> holders(data.size());
      for (size_t i = 0; i < data.size(); ++i) {
        holders[i].kind = paths[i].empty() ? HolderKind::unknown : HolderKind::attribute;
        holders[i].path = holders[i].container = paths[i];
      }
      return holders;
    });
    for (int i = 0; i < 9; ++i) {
      step(kept, finder);
    }
    REQUIRE(finder.leaks().size() == 1);
    const auto& holder = finder.leaks()[0].holder;
    CHECK(holder.path == path);
    CHECK(holder.linked == !container.empty());
    CHECK(holder.container == (container.empty() ? path : container));
  }
}

TEST_CASE("A sum that grows by every fifth step is a leak too", "[probes]") {
  const Tracking on;
  int64_t length = 0;
  LeakFinder finder({}, nullptr, [&] {
    return std::vector<LeakFinder::Sum>{{named(HolderKind::variable), length}};
  });
  for (int i = 0; i < 35; ++i) {
    length += i % 5 == 0 ? 1 : 0;
    CHECK(finder.leaks().size() == (i <= 30 ? 0U : 1U));
    finder.check();
  }
  for (int i = 0; i < 100; ++i) {  // once more for each epoch
    length = i % 6;
    finder.check();
  }
  CHECK(finder.leaks().size() == 1);
}

TEST_CASE("A sum that grows by each step is a leak, although it holds no bytes", "[probes]") {
  const Tracking on;
  int64_t length = 0;
  LeakFinder finder({}, nullptr, [&] {
    return std::vector<LeakFinder::Sum>{{named(HolderKind::variable), length}};
  });
  const auto run = [&](int steps, int64_t growth) {
    for (int i = 0; i < steps; ++i) {
      length += growth;
      finder.check();
    }
  };
  run(6, 1);
  run(1, 0);  // it stopped: counted anew
  run(6, 1);
  CHECK(finder.leaks().empty());
  run(1, 1);
  CHECK(finder.leaks().size() == 1);
}

}  // namespace test_leak_finder
