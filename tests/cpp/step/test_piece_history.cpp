#include "support/catch.h"

#include <brimful/step/pieces.h>
#include "step/piece_history.h"

#include <algorithm>
#include <optional>
#include <vector>

namespace test_piece_history {

using brimful::PieceHistory;

namespace {
constexpr int64_t kMb = 1'000'000;

/// 3 MB whatever the rows, and 1 MB a row; gradients of 1 MB more where there are several pieces.
int64_t need(int64_t rows, int64_t pieces) {
  return (3 + rows + (pieces > 1 ? 1 : 0)) * kMb;
}

struct Seen {
  PieceHistory history;
  void run(int64_t rows, int64_t pieces) {
    const auto piece_rows = (rows + pieces - 1) / pieces;
    history.note(piece_rows, pieces, need(piece_rows, pieces));
  }
};
}  // namespace

TEST_CASE("Nothing is known to fit at first", "[sizer]") {
  const PieceHistory history;
  CHECK(history.coarser(100, 4, 1000 * kMb, 0) == 4);
  CHECK(history.coarser(100, 4, std::nullopt, 0) == 4);
  CHECK(history.finer(100, 4, 10 * kMb) == 8);
}

TEST_CASE("A size that was seen comes back when there is room for it again", "[sizer]") {
  Seen seen;
  seen.run(100, 1);
  seen.run(100, 4);
  CHECK(seen.history.coarser(100, 4, need(100, 1), 0) == 1);
  CHECK(seen.history.coarser(100, 4, need(100, 1) - 1, 0) > 1);
}

TEST_CASE("Pieces grow no further than their need, in proportion, has room", "[sizer]") {
  Seen seen;
  seen.run(100, 10);                                       // 14 MB for pieces of 10 rows
  CHECK(seen.history.coarser(100, 10, 27 * kMb, 0) == 6);  // 17 rows: 23.8 MB; 20 rows: 28 MB
  seen.run(100, 6);                                        // 21 MB for 17 rows
  CHECK(seen.history.coarser(100, 6, 27 * kMb, 0) == 5);   // 20 rows: 24.7 MB
  CHECK(seen.history.coarser(100, 6, std::nullopt, 0) == 1);
}

TEST_CASE("No size is taken to fit that does not, whatever was seen", "[sizer]") {
  for (int64_t smallest = 2; smallest <= 50; ++smallest) {
    for (int64_t largest = smallest; largest <= 50; ++largest) {
      Seen seen;
      seen.run(smallest * 2, 2);
      seen.run(largest * 2, 2);
      for (int64_t room = 5 * kMb; room < 130 * kMb; room += 7 * kMb) {
        const auto pieces = seen.history.coarser(120, 60, room, 0);
        CHECK((pieces == 60 || need((120 + pieces - 1) / pieces, pieces) <= room));
      }
    }
  }
}

TEST_CASE("A size that failed waits longer each time, or for more room", "[sizer]") {
  Seen seen;
  seen.run(100, 1);
  seen.run(100, 2);
  const auto room = 200 * kMb;  // something else took it
  seen.history.note(100, 1, need(100, 1), room);
  const auto next_try = [&](int64_t from) {
    auto step = from;
    while (seen.history.coarser(100, 2, room, step) == 2) {
      ++step;
    }
    return step;
  };
  seen.history.note_failure(100, 1, room, 0);
  const auto second = next_try(0);
  CHECK(second == 16);
  CHECK(seen.history.coarser(100, 2, room + room / 20, 0) == 2);  // a batch less is no other room
  CHECK(seen.history.coarser(100, 2, room + room / 19, 0) == 1);
  seen.history.note_failure(100, 1, room, second);
  CHECK(next_try(second) == second + 32);
  seen.history.note_failure(50, 2, 40 * kMb, 100);  // of another size: a new drop
  CHECK(seen.history.coarser(100, 2, room, 100) == 1);
}

// A caching allocator cannot use all of the room: some of it is in blocks that are too small.
TEST_CASE("A failure below an estimate says which share of the room counts", "[sizer]") {
  constexpr int64_t kUsable = 84;  // percent
  PieceHistory history;
  int64_t failures = 0;
  int64_t pieces = 16;
  int64_t room = 41 * kMb;
  const auto run = [&](int64_t step) {
    const auto bytes = [&] { return 34 * kMb * brimful::pieces_for(2048, pieces) / 128; };
    pieces = history.coarser(2048, pieces, room, step);
    if (100 * bytes() > kUsable * room) {
      ++failures;
      history.note_failure(brimful::pieces_for(2048, pieces), pieces, room, step);
      pieces = history.finer(2048, pieces, room);
    } else {
      history.note(brimful::pieces_for(2048, pieces), pieces, bytes(), room);
    }
  };
  for (int64_t step = 0; step < 5; ++step) {
    run(step);
  }
  CHECK(failures >= 1);
  failures = 0;
  for (int64_t step = 5; step < 2000; ++step) {
    room = 41 * kMb + step % 7 * kMb / 10;
    run(step);
  }
  CHECK(failures == 0);
  room = 1000 * kMb;
  run(2000);
  CHECK(pieces == 1);
  CHECK(failures == 0);
}

TEST_CASE("One refinement is enough where the need is known and rows are most of it", "[sizer]") {
  Seen seen;
  seen.run(100, 1);
  for (int64_t room = 31 * kMb; room < need(100, 1); room += 3 * kMb) {
    const auto pieces = seen.history.finer(100, 1, room);
    CHECK(need((100 + pieces - 1) / pieces, pieces) <= room);
  }
  CHECK(seen.history.finer(100, 1, 200 * kMb) == 2);  // memory ran out although there was room
  CHECK(seen.history.finer(100, 1, -kMb) == 2);
  CHECK(seen.history.finer(100, 1, kMb) == 2);  // a passing shortage
  CHECK(seen.history.finer(3, 3, kMb) == 3);
  seen.run(11, 2);
  CHECK(seen.history.finer(11, 2, 4 * kMb) == 5);
  seen.run(8, 2);
  CHECK(seen.history.finer(8, 2, 3 * kMb) == 4);  // pieces of one row are left to the second try
}

// Each second step has gradients of the one before in its way.
TEST_CASE("Pieces that are known not to fit beside what else is there do not run out again",
          "[sizer]") {
  PieceHistory history;
  std::vector<int64_t> failed;
  int64_t piece_rows = 100;
  for (int64_t step = 0; step < 200; ++step) {
    const PieceHistory::Room room = step % 2 == 0 ? 60 * kMb : 45 * kMb;
    auto pieces = history.fitting(100, brimful::pieces_for(100, piece_rows), room, step);
    bool at_once = true;
    while (need(brimful::pieces_for(100, pieces), pieces) > *room) {
      at_once = false;
      history.note_failure(brimful::pieces_for(100, pieces), pieces, room, step);
      pieces = history.finer(100, pieces, room);
      piece_rows = brimful::pieces_for(100, pieces);
    }
    if (at_once) {
      const auto rows = brimful::pieces_for(100, pieces);
      history.note(rows, pieces, need(rows, pieces), room);
      piece_rows = std::max(piece_rows, rows);
    } else {
      failed.push_back(step);
    }
  }
  CHECK(failed == std::vector<int64_t>{0, 1});  // nothing of the size of step 0 was seen by then
  CHECK(history.fitting(100, 2, 60 * kMb, 200) == 2);
  CHECK(history.fitting(100, 2, 45 * kMb, 200) == 3);
  CHECK(history.fitting(100, 2, 4 * kMb, 200) == 8);  // smaller ones were not seen
  CHECK(history.fitting(100, 2, std::nullopt, 200) <= 2);
}

TEST_CASE("A size that fits in much more room is no sign that it fits in less", "[sizer]") {
  Seen seen;
  seen.history.note_failure(50, 2, 45 * kMb, 0);
  seen.history.note(50, 2, 40 * kMb, 60 * kMb);
  CHECK(seen.history.fitting(100, 2, 45 * kMb, 1) == 3);
  CHECK(seen.history.fitting(100, 2, 60 * kMb, 1) == 2);
  CHECK(seen.history.fitting(100, 2, 45 * kMb, 16) == 2);  // once more
  seen.history.note(50, 2, 40 * kMb, 45 * kMb);
  CHECK(seen.history.fitting(100, 2, 45 * kMb, 17) == 2);
}

// Bytes look in proportion to the rows, but from 17 rows on a library takes more.
TEST_CASE("Sizes that look as if they fitted are tried a few times, not in every epoch",
          "[sizer]") {
  const int64_t last_rows = GENERATE(40, 64);
  const int64_t jitter = GENERATE(0, kMb / 10);  // no batch is looked ahead at an epoch's end
  PieceHistory history;
  int64_t failures = 0;
  int64_t piece_rows = 64;
  for (int64_t step = 0; step < 96; ++step) {
    const bool last = step % 8 == 7;
    const int64_t rows = last ? last_rows : 64;
    const PieceHistory::Room room = 100 * kMb + (last ? jitter : 0);
    auto pieces = history.coarser(rows, brimful::pieces_for(rows, piece_rows), room, step);
    const auto begun = pieces;
    while (brimful::pieces_for(rows, pieces) > 16) {
      ++failures;
      history.note_failure(brimful::pieces_for(rows, pieces), pieces, room, step);
      pieces = history.finer(rows, pieces, room);
      piece_rows = brimful::pieces_for(rows, pieces);
    }
    if (pieces == begun) {
      const auto most = brimful::pieces_for(rows, pieces);
      history.note(most, pieces, most * kMb);
      piece_rows = std::max(piece_rows, most);
    }
  }
  CHECK(failures <= 8);
}

}  // namespace test_piece_history
