#include "support/catch.h"

#include <brimful/sizer/row_evidence.h>
#include <c10/util/Exception.h>

namespace test_row_evidence {

using namespace brimful::detail;

namespace {
AlikeList of(int64_t length, Rows column_rows, bool uneven = false, const char* name = "x") {
  return {name, length, column_rows, uneven};
}
}  // namespace

TEST_CASE("Lists are read as the rest of the batch says", "[sizer]") {
  struct Case {
    Rows fixed;
    std::vector<AlikeList> lists;
    Rows rows;  // nothing: refused
  };
  const std::vector<Case> cases{
      {12, {of(12, 3)}, 12},                        // images beside a tensor of labels
      {12, {of(12, 3, true)}, 12},                  // of several sizes
      {12, {of(3, 12)}, 12},                        // three columns
      {12, {of(11, 3)}, std::nullopt},              // neither
      {12, {of(5, std::nullopt)}, 12},              // numbers of another kind
      {3, {of(3, 3)}, std::nullopt},                // both
      {2, {of(2, 2)}, 2},                           // two columns of two rows
      {std::nullopt, {of(12, 3)}, std::nullopt},    // both, and more of them than rows
      {std::nullopt, {of(3, 32)}, 32},              // triplets
      {std::nullopt, {of(2, 1)}, 1},                // a pair of one row
      {std::nullopt, {of(12, 3), of(12, {})}, 12},  // images and numbers
      {std::nullopt, {of(3, 12), of(12, {})}, 12},  // columns and numbers
      {std::nullopt, {of(2, 3), of(2, {})}, std::nullopt},
      {std::nullopt, {of(3, 3), of(3, {})}, std::nullopt},
      {std::nullopt, {of(12, 3, true), of(12, {})}, 12},
      {std::nullopt, {of(12, 3, true), of(12, 5, true)}, 12},
      {std::nullopt, {of(2, 3, true), of(2, {})}, 2},  // no columns, however few
      {std::nullopt, {of(12, 3, true)}, std::nullopt},
      {std::nullopt, {of(12, 3), of(12, 5)}, 12},  // two samples' sizes: no columns
      {std::nullopt, {of(12, 3), of(12, 3)}, std::nullopt},
      {std::nullopt, {of(2, 8), of(2, 8)}, 8},  // pairs of columns
      {std::nullopt, {of(2, 8), of(3, 8)}, 8},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    INFO("case " << i);
    const auto& [fixed, lists, rows] = cases[i];
    if (rows) {
      CHECK(decide_rows({fixed, lists}) == rows);
    } else {
      CHECK_THROWS_AS(decide_rows({fixed, lists}), c10::ValueError);
    }
  }
  CHECK(decide_rows({std::nullopt, {of(5, std::nullopt)}}) == std::nullopt);
}

namespace {
AlikeList made_of(Entries entries, int64_t length, Rows column_rows, int64_t dims = 2) {
  return {"x", length, column_rows, false, entries, dims, dims};
}
}  // namespace

TEST_CASE("What no column is made of says that entries are rows", "[sizer]") {
  const auto texts = [](int64_t length) { return made_of(Entries::plain, length, {}); };
  struct Case {
    Rows fixed;
    std::vector<AlikeList> lists;
    Rows rows;  // nothing: refused
  };
  for (const int64_t n : {1, 2, 3, 8}) {
    const std::vector<Case> cases{
        {std::nullopt, {of(n, 50), texts(n)}, n},    // waves and texts
        {std::nullopt, {texts(50), of(n, 50)}, 50},  // columns and texts
        {std::nullopt, {of(n, 50), texts(n), texts(50)}, std::nullopt},
        {std::nullopt, {made_of(Entries::samples, n, 50)}, n},
        {std::nullopt, {made_of(Entries::samples, n, n)}, n},
        {std::nullopt, {made_of(Entries::samples, n, 50), of(n + 1, 50)}, std::nullopt},
        {std::nullopt, {made_of(Entries::records, n, 50, 1)}, n},  // blocks of tokens
        {std::nullopt, {made_of(Entries::records, n, 50), of(n, 50)}, n},
        {std::nullopt, {made_of(Entries::records, n, 50)}, n <= 3 ? Rows(50) : Rows()},
        {std::nullopt, {made_of(Entries::lists, n, 50)}, n <= 3 ? Rows(50) : Rows()},
        {n, {made_of(Entries::samples, n, n)}, n},
    };
    for (size_t i = 0; i < cases.size(); ++i) {
      INFO("case " << i << ", rows " << n);
      const auto& [fixed, lists, rows] = cases[i];
      if (rows) {
        CHECK(decide_rows({fixed, lists}) == rows);
      } else {
        CHECK_THROWS_AS(decide_rows({fixed, lists}), c10::ValueError);
      }
    }
  }
  ListReadings none;
  CHECK(reading_of(made_of(Entries::samples, 3, 3), 3, none) == Reading::rows);
}

TEST_CASE("What a list was taken for holds for smaller batches", "[sizer]") {
  ListReadings samples;
  CHECK(decide_rows({12, {of(12, 3)}}, samples) == 12);
  for (const int64_t rows : {1, 2, 3}) {
    CHECK(decide_rows({rows, {of(rows, 3)}}, samples) == rows);
    CHECK(reading_of(of(rows, 3), rows, samples) == Reading::rows);
  }
  ListReadings columns;
  CHECK(decide_rows({std::nullopt, {of(3, 32)}}, columns) == 32);
  for (const int64_t rows : {1, 2, 3}) {
    CHECK(decide_rows({std::nullopt, {of(3, rows)}}, columns) == rows);
    CHECK(reading_of(of(3, rows), rows, columns) == Reading::columns);
  }
  CHECK_THROWS_AS(decide_rows({std::nullopt, {of(4, 3)}}, columns), c10::ValueError);
}

}  // namespace test_row_evidence
