#include <brimful/probes/fragmentation.h>
#include <c10/util/Exception.h>

#include "support/catch.h"

namespace test_fragmentation {

using namespace brimful::probes;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

ArenaBlock live(int64_t mib) {
  return {mib * kMiB, true, nullptr};
}

ArenaBlock free_of(int64_t mib) {
  return {mib * kMiB, false, nullptr};
}

}  // namespace

TEST_CASE("the smallest live block that stands in the way of a request is found",
          "[fragmentation]") {
  const std::vector<ArenaSegment> arena{
      {{free_of(20), live(1), free_of(20), live(4), free_of(30)}, false},
      {{live(2), free_of(10)}, false},
  };
  const auto found = fragmentation(arena, 40 * kMiB);
  CHECK(found.free_bytes == 80 * kMiB);
  CHECK(found.largest_free_bytes == 30 * kMiB);
  CHECK(found.share == 0.625);
  REQUIRE(found.splitter);
  CHECK(found.splitter->block.bytes == kMiB);
  CHECK(found.splitter->room_bytes == 41 * kMiB);

  CHECK(fragmentation(arena, 41 * kMiB).splitter->block.bytes == kMiB);  // its own room counts

  const auto larger = fragmentation(arena, 50 * kMiB);
  REQUIRE(larger.splitter);
  CHECK(larger.splitter->block.bytes == 4 * kMiB);
}

TEST_CASE("free neighbours are one piece", "[fragmentation]") {
  const auto found = fragmentation({{{free_of(8), free_of(8), live(1)}, true}}, 16 * kMiB);
  CHECK(found.largest_free_bytes == 16 * kMiB);
  CHECK(found.share == 0);
  CHECK(found.expandable);
  CHECK_FALSE(found.splitter);
}

TEST_CASE("no block splits where none would make room, and nothing is free in no arena",
          "[fragmentation]") {
  CHECK_FALSE(fragmentation({{{free_of(1), live(1), free_of(1)}, false}}, 9 * kMiB).splitter);
  CHECK_FALSE(
      fragmentation({{{live(9), live(9)}, false}}, 5 * kMiB).splitter);  // nothing beside it
  CHECK(fragmentation({}, 1).share == 0);
  CHECK_THROWS_AS(fragmentation({}, -1), c10::ValueError);
}

}  // namespace test_fragmentation
