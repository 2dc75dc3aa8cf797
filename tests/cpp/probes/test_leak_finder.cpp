#include <brimful/memory/live_table.h>
#include <brimful/probes/leak_finder.h>

#include <ATen/ops/empty.h>

#include <array>
#include <mutex>

#include "memory/tracker.h"
#include "support/catch.h"

using namespace brimful;
using probes::Holder;
using probes::HolderKind;
using probes::LeakFinder;

namespace {

struct Tracking {
  Tracking() { memory::start_tracking(); }
  ~Tracking() { memory::stop_tracking(); }
};

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
