#include <c10/util/Exception.h>
#include "support/catch.h"

#include <brimful/step/pieces.h>

#include <algorithm>
#include <numeric>

namespace test_pieces {

using brimful::equal_pieces;
using brimful::finer;
using brimful::finer_within;
using brimful::largest_piece;
using brimful::pieces_for;
using brimful::split_into_few_sizes;
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

TEST_CASE("Splits of few sizes have equal pieces where they can, else common ones", "[sizer]") {
  std::set<int64_t> equal;
  CHECK(split_into_few_sizes(120, 18, equal) == Split(8, 15));
  CHECK(split_into_few_sizes(120, 120, equal) == Split{120});
  CHECK(split_into_few_sizes(121, 18, equal) == Split{16, 16, 16, 16, 16, 16, 16, 6, 3});
  CHECK(split_into_few_sizes(7, 6, equal) == Split{4, 3});
  CHECK(split_into_few_sizes(4, 3, equal) == Split{2, 2});
  CHECK(split_into_few_sizes(0, 3, equal).size() <= 1);
  CHECK(equal == std::set<int64_t>{15, 2});
  CHECK_THROWS_WITH(split_into_few_sizes(4, 0, equal), Catch::Contains("rows of a piece: 0"));
}

TEST_CASE("However batches and memory change, their pieces have few sizes", "[sizer]") {
  std::set<int64_t> equal;
  std::set<int64_t> met;
  for (int64_t rows = 1; rows <= 512; ++rows) {
    for (int64_t piece_rows = 1; piece_rows < rows && piece_rows <= 256; ++piece_rows) {
      const auto split = split_into_few_sizes(rows, piece_rows, equal);
      REQUIRE(std::accumulate(split.begin(), split.end(), int64_t{0}) == rows);
      REQUIRE(largest_piece(split) <= piece_rows);
      REQUIRE((piece_rows <= 2 || *std::min_element(split.begin(), split.end()) >= 2));
      REQUIRE(static_cast<int64_t>(split.size()) <= 3 * pieces_for(rows, piece_rows) / 2 + 6);
      met.insert(split.begin(), split.end());
    }
  }
  CHECK(equal.size() <= 4);
  CHECK(met.size() <= 5 + 2 * 8);
}

TEST_CASE("A finer split doubles the pieces down to one row each", "[sizer]") {
  CHECK(finer(8, 1) == 2);
  CHECK(finer(8, 4) == 8);
  CHECK(finer(7, 4) == 7);
  CHECK(finer(7, 7) == 7);
}

TEST_CASE("Retries end with one row each where they are many, and halve where they are few",
          "[sizer]") {
  for (const int64_t rows : {2, 100, 256, 257, 1000, 65536, 1000000}) {
    for (const int64_t max_retries : {8, 9, 20}) {
      int64_t pieces = 1;
      for (int64_t failures = 1; failures <= max_retries && pieces < rows; ++failures) {
        const auto next = finer_within(rows, pieces, failures, max_retries);
        CHECK(next >= finer(rows, pieces));
        CHECK(next <= rows);
        if (rows <= int64_t{1} << max_retries) {
          CHECK(next == finer(rows, pieces));
        }
        pieces = next;
      }
      CHECK(pieces == rows);
    }
  }
  CHECK(finer_within(1000, 1, 1, 7) == 2);
  CHECK(finer_within(1000, 4, 3, 2) == 8);
}

}  // namespace test_pieces
