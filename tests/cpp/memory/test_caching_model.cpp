#include "memory/caching_model.h"
#include "support/catch.h"

namespace test_caching_model {

using brimful::kKiB;
using brimful::kMiB;
using brimful::memory::caching_block_bytes;
using brimful::memory::CachingBlock;
using brimful::memory::CachingMoment;
using brimful::memory::CachingRequest;
using brimful::memory::CachingRoom;
using brimful::memory::CachingSegment;
using brimful::memory::CachingSettings;
using brimful::memory::give_back_block;
using brimful::memory::release_cached;
using brimful::memory::replay_caching;
using Kind = CachingRequest::Kind;
using State = CachingBlock::State;

namespace {

constexpr uint64_t kStream = 7;

CachingRequest take(uint64_t block, int64_t bytes, uint64_t stream = kStream) {
  return {Kind::take, block, bytes, stream};
}

CachingRequest free_of(uint64_t block) {
  return {Kind::give_back, block};
}

CachingRoom room_of(int64_t bytes) {
  return {bytes, bytes};
}

/// Reserved bytes behind each request, in MiB.
std::vector<double> reserved(const std::vector<CachingRequest>& requests,
                             const CachingSettings& settings = {},
                             const std::vector<CachingSegment>& pool = {}) {
  std::vector<CachingMoment> moments;
  replay_caching(pool, settings, room_of(1024 * kMiB), requests, &moments);
  std::vector<double> all;
  for (const auto& moment : moments) {
    all.push_back(static_cast<double>(moment.reserved_bytes) / kMiB);
  }
  return all;
}

}  // namespace

TEST_CASE("A request is rounded up to 512 bytes, or to parts of a power of two", "[memory]") {
  const CachingSettings plain;
  CHECK(caching_block_bytes(1, plain) == 512);
  CHECK(caching_block_bytes(512, plain) == 512);
  CHECK(caching_block_bytes(513, plain) == 1024);
  CachingSettings parts;
  parts.power2_divisions = {4, 4, 1};               // to 2 MiB, to 4 MiB, beyond
  CHECK(caching_block_bytes(1200, parts) == 1536);  // too small for four parts
  CHECK(caching_block_bytes(5 * kKiB + 1, parts) == 6 * kKiB);
  CHECK(caching_block_bytes(3 * kMiB + 1, parts) == 3 * kMiB + 512 * kKiB);
  CHECK(caching_block_bytes(5 * kMiB + 1, parts) == 5 * kMiB + 512);
}

TEST_CASE("Segments are 2 MiB, 20 MiB, or the request's in steps of 2 MiB", "[memory]") {
  CHECK(reserved({take(1, kMiB), take(2, kMiB), take(3, 1)}) == std::vector<double>{2, 2, 4});
  CHECK(reserved({take(1, kMiB + 1), take(2, 9 * kMiB), take(3, 9 * kMiB), take(4, kMiB + 1)}) ==
        std::vector<double>{20, 20, 20, 40});
  CHECK(reserved({take(1, 11 * kMiB), take(2, kMiB + 1, kStream)}) == std::vector<double>{12, 32});
}

TEST_CASE("A stream has blocks of its own", "[memory]") {
  CHECK(reserved({take(1, 1), take(2, 1, kStream + 1), take(3, 1)}) ==
        std::vector<double>{2, 4, 4});
}

TEST_CASE("The best fit is taken and its neighbours are joined again", "[memory]") {
  const std::vector<CachingRequest> requests = {
      take(1, 12 * kMiB), take(2, 30 * kMiB), free_of(1),
      free_of(2),         take(3, 11 * kMiB),  // of 12, not of 30
      take(4, 15 * kMiB), take(5, 15 * kMiB), free_of(4),
      free_of(5),         take(6, 30 * kMiB)};
  CHECK(reserved(requests).back() == 42);
}

TEST_CASE("Of blocks that fit alike that of the oldest segment is taken", "[memory]") {
  const auto half_used = [](uint64_t address, int64_t order) {
    return CachingSegment{
        address, kStream, true, false, false, order, {{kMiB, State::cached}, {kMiB, State::live}}};
  };
  const std::vector<CachingSegment> pool = {half_used(4 * kMiB, 2), half_used(8 * kMiB, 1)};
  const CachingRoom full = {4 * kMiB, 0};
  const auto then_free = [&](uint64_t address) {  // and give its segment to another stream
    return replay_caching(pool, {}, full,
                          {take(1, kMiB), free_of(address), take(2, kMiB, kStream + 1)});
  };
  CHECK_FALSE(then_free(5 * kMiB).ran_out);
  CHECK(then_free(9 * kMiB).ran_out == 2);
}

TEST_CASE("A rest of a mebibyte or less stays with its block", "[memory]") {
  std::vector<CachingMoment> moments;
  replay_caching({}, {}, room_of(1024 * kMiB), {take(1, 11 * kMiB), free_of(1), take(2, 1)},
                 &moments);
  CHECK(moments.at(0).allocated_bytes == 12 * kMiB);
  CHECK(moments.at(1).allocated_bytes == 0);
  CHECK(moments.at(2).allocated_bytes == 512);
}

TEST_CASE("Blocks beyond max_split_size are kept whole", "[memory]") {
  CachingSettings settings;
  settings.max_split_bytes = 64 * kMiB;
  settings.max_unsplit_excess_bytes = 20 * kMiB;
  const auto begin = std::vector<CachingRequest>{take(1, 100 * kMiB), free_of(1)};
  const auto then = [&](int64_t bytes) {
    auto requests = begin;
    requests.push_back(take(2, bytes));
    return reserved(requests, settings).back();
  };
  CHECK(then(90 * kMiB) == 100);
  CHECK(then(70 * kMiB) == 170);  // 30 more would lie idle
  CHECK(then(30 * kMiB) == 130);
}

TEST_CASE("Before memory runs out whole cached segments are given back", "[memory]") {
  const std::vector<CachingRequest> requests = {take(1, 40 * kMiB), take(2, 40 * kMiB), free_of(1),
                                                take(3, 60 * kMiB)};
  std::vector<CachingMoment> moments;
  const auto fits = replay_caching({}, {}, room_of(100 * kMiB), requests, &moments);
  CHECK_FALSE(fits.ran_out);
  CHECK(fits.releases == 1);
  CHECK(moments.back().reserved_bytes == 100 * kMiB);
  const auto not_fits = replay_caching({}, {}, room_of(99 * kMiB), requests);
  CHECK(not_fits.ran_out == 3);
  CHECK(not_fits.peak.reserved_bytes == 80 * kMiB);
  auto fraction = room_of(1024 * kMiB);
  fraction.allowed_bytes = 99 * kMiB;
  CHECK(replay_caching({}, {}, fraction, requests).ran_out == 3);
}

TEST_CASE("A replay begins with the pool as it is", "[memory]") {
  const auto pool = [](State state) {
    return std::vector<CachingSegment>{
        {4096, kStream, false, false, false, 1, {{10 * kMiB, State::live}, {10 * kMiB, state}}}};
  };
  const auto more = std::vector<CachingRequest>{take(1, 9 * kMiB)};
  CHECK(reserved(more, {}, pool(State::cached)).back() == 20);
  CHECK(reserved(more, {}, pool(State::pending)).back() == 40);
  const auto behind = 4096 + static_cast<uint64_t>(10 * kMiB);
  CHECK(reserved({{Kind::complete, behind}, more.front()}, {}, pool(State::pending)).back() == 20);
  CHECK(reserved({free_of(4096), take(1, 20 * kMiB)}, {}, pool(State::cached)).back() == 20);
  auto of_a_graph = pool(State::cached);
  of_a_graph.front().is_private = true;
  CHECK(reserved(more, {}, of_a_graph).back() == 40);
  CHECK(reserved({free_of(999)}, {}, {}).back() == 0);
}

TEST_CASE("What another stream uses is waited for before memory runs out", "[memory]") {
  const std::vector<CachingRequest> requests = {
      take(1, 40 * kMiB), {Kind::give_back_pending, 1}, take(2, 40 * kMiB), take(3, 40 * kMiB)};
  std::vector<CachingMoment> moments;
  CHECK_FALSE(replay_caching({}, {}, room_of(80 * kMiB), requests, &moments).ran_out);
  CHECK(moments.at(1).allocated_bytes == 0);
  CHECK(moments.at(2).reserved_bytes == 80 * kMiB);
}

TEST_CASE("Expandable segments grow by pages, and give back those that are free", "[memory]") {
  CachingSettings settings;
  settings.expandable = true;
  CHECK(
      reserved({take(1, 15 * kMiB), take(2, 15 * kMiB), take(3, 1), free_of(2), take(4, 45 * kMiB)},
               settings) == std::vector<double>{20, 40, 42, 42, 62});
  const std::vector<CachingRequest> requests = {take(1, 30 * kMiB), take(2, 10 * kMiB), free_of(1),
                                                take(3, kMiB, kStream + 1)};
  std::vector<CachingMoment> moments;
  CHECK_FALSE(replay_caching({}, settings, room_of(40 * kMiB), requests, &moments).ran_out);
  CHECK(moments.back().reserved_bytes == 22 * kMiB);  // a page of 20 of the 30 went
}

TEST_CASE("Pages that a snapshot lacks are mapped again", "[memory]") {
  CachingSettings settings;
  settings.expandable = true;
  const auto page = 20 * kMiB;
  const auto third = static_cast<uint64_t>(1 << 30) + static_cast<uint64_t>(2 * page);
  const std::vector<CachingSegment> pool = {
      {1 << 30, kStream, false, true, false, 1, {{page, State::cached}}},
      {third, kStream, false, true, false, 1, {{page, State::live}}}};
  CHECK(reserved({take(1, 2 * page), take(2, page)}, settings, pool) ==
        std::vector<double>{60, 80});
}

TEST_CASE("A pool can be seen without a block, and without its cache", "[memory]") {
  const auto live = State::live;
  std::vector<CachingSegment> pool = {{kMiB,
                                       kStream,
                                       false,
                                       false,
                                       false,
                                       1,
                                       {{4 * kMiB, live}, {kMiB, live}, {kMiB, State::cached}}},
                                      {32 * kMiB, kStream, false, false, true, 2, {{kMiB, live}}}};
  CHECK(give_back_block(pool, 2 * kMiB) == 0);   // in the middle of one
  CHECK(give_back_block(pool, 32 * kMiB) == 0);  // of a private pool
  CHECK(release_cached(pool) == 0);
  CHECK(give_back_block(pool, 5 * kMiB) == kMiB);
  CHECK(give_back_block(pool, 5 * kMiB) == 0);
  CHECK(pool.front().blocks.size() == 2);
  CHECK(give_back_block(pool, kMiB) == 4 * kMiB);
  CHECK(pool.front().blocks.size() == 1);
  CHECK(release_cached(pool) == 6 * kMiB);
  CHECK(pool.size() == 1);
}

TEST_CASE("Garbage is collected where a fraction and a threshold are set", "[memory]") {
  CachingSettings settings;
  settings.garbage_collection_threshold = 0.5;
  auto room = room_of(1024 * kMiB);
  room.allowed_bytes = 100 * kMiB;
  const std::vector<CachingRequest> requests = {take(1, 30 * kMiB), take(2, 40 * kMiB),
                                                free_of(1),         take(3, 2 * kMiB),
                                                free_of(2),         take(4, 60 * kMiB)};
  std::vector<CachingMoment> moments;
  replay_caching({}, settings, room, requests, &moments);
  CHECK(moments.back().reserved_bytes == 90 * kMiB);
}

}  // namespace test_caching_model
