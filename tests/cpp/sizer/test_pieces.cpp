#include <c10/util/Exception.h>
#include "support/catch.h"

#include <brimful/sizer/pieces.h>

using brimful::equal_pieces;
using brimful::finer;
using brimful::pieces_for;
using brimful::split_rows;
using Split = std::vector<int64_t>;

TEST_CASE("Pieces are as even as can be, larger ones first", "[sizer]") {
  CHECK(split_rows(8, 1) == Split{8});
  CHECK(split_rows(8, 4) == Split{2, 2, 2, 2});
  CHECK(split_rows(7, 3) == Split{3, 2, 2});
  CHECK(split_rows(2, 3) == Split{1, 1, 0});
  CHECK(split_rows(0, 2) == Split{0, 0});
  CHECK_THROWS_AS(split_rows(-1, 1), c10::ValueError);
  CHECK_THROWS_WITH(split_rows(4, 0), Catch::Contains("(rows: 4, pieces: 0)"));
}

TEST_CASE("Every split covers its batch", "[sizer]") {
  for (int64_t rows = 0; rows <= 40; ++rows) {
    for (int64_t pieces = 1; pieces <= 12; ++pieces) {
      const auto split = split_rows(rows, pieces);
      int64_t sum = 0;
      for (const auto size : split) {
        sum += size;
        CHECK(size <= split.front());
        CHECK(size >= split.front() - 1);
      }
      CHECK(sum == rows);
      CHECK(split.size() == static_cast<size_t>(pieces));
    }
  }
}

TEST_CASE("As many pieces as the rows of one demand", "[sizer]") {
  CHECK(pieces_for(8, 8) == 1);
  CHECK(pieces_for(9, 8) == 2);
  CHECK(pieces_for(1, 8) == 1);
  CHECK(pieces_for(0, 8) == 1);
  CHECK(pieces_for(7, 1) == 7);
}

TEST_CASE("Equal pieces cost a quarter more pieces at most", "[sizer]") {
  CHECK(equal_pieces(128, 1) == 1);
  CHECK(equal_pieces(128, 13) == 16);
  CHECK(equal_pieces(128, 12) == 12);  // 16 would be a third more
  CHECK(equal_pieces(120, 7) == 8);
  CHECK(equal_pieces(127, 100) == 100);
  CHECK(equal_pieces(5, 5) == 5);
  for (int64_t rows = 1; rows <= 60; ++rows) {
    for (int64_t pieces = 1; pieces <= rows; ++pieces) {
      const auto found = equal_pieces(rows, pieces);
      CHECK((found == pieces || rows % found == 0));
      CHECK((found >= pieces && 4 * (found - pieces) <= pieces && found <= rows));
    }
  }
}

TEST_CASE("A finer split doubles the pieces down to one row each", "[sizer]") {
  CHECK(finer(8, 1) == 2);
  CHECK(finer(8, 4) == 8);
  CHECK(finer(7, 4) == 7);
  CHECK(finer(7, 7) == 7);
}
