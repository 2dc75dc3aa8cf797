#include <ATen/ATen.h>
#include "support/catch.h"

#include <brimful/sizer/split.h>

#include <map>
#include <string>
#include <tuple>

using brimful::rows_of;
using brimful::slice_rows;

namespace {
struct Example {
  Example(at::Tensor d, at::Tensor t) : data(std::move(d)), target(std::move(t)) {}
  at::Tensor data;
  at::Tensor target;
};

at::Tensor rows(int64_t count) {
  return at::arange(count);
}
}  // namespace

TEST_CASE("A tensor is split along its first dimension without a copy", "[sizer]") {
  const auto batch = at::arange(12).view({4, 3});
  CHECK(rows_of(batch) == 4);
  const auto piece = slice_rows(batch, 1, 3);
  CHECK(at::equal(piece, at::arange(3, 9).view({2, 3})));
  CHECK(piece.storage().data() == batch.storage().data());
  CHECK_THROWS_AS(rows_of(at::zeros({})), c10::ValueError);
  CHECK_THROWS_AS(rows_of(at::Tensor()), c10::ValueError);
}

TEST_CASE("Structures are split in all their parts", "[sizer]") {
  const Example example(rows(5), rows(5) + 10);
  CHECK(rows_of(example) == 5);
  CHECK(at::equal(slice_rows(example, 2, 4).target, at::arange(12, 14)));

  const std::pair<at::Tensor, std::vector<at::Tensor>> nested{rows(5), {rows(5), rows(5) * 2}};
  CHECK(rows_of(nested) == 5);
  CHECK(at::equal(slice_rows(nested, 1, 2).second[1], at::full({1}, 2, at::kLong)));

  const std::map<std::string, at::Tensor> named{{"x", rows(3)}, {"y", rows(3) + 1}};
  CHECK(rows_of(named) == 3);
  CHECK(at::equal(slice_rows(named, 0, 1).at("y"), at::ones({1}, at::kLong)));

  const std::tuple<at::Tensor, at::Tensor, at::Tensor> three{rows(4), rows(4), rows(4) + 3};
  CHECK(rows_of(three) == 4);
  CHECK(at::equal(std::get<2>(slice_rows(three, 3, 4)), at::full({1}, 6, at::kLong)));

  CHECK(rows_of(std::vector<at::Tensor>{}) == 0);
}

TEST_CASE("Parts that disagree in size are refused with both sizes", "[sizer]") {
  CHECK_THROWS_AS(rows_of(Example(rows(4), rows(3))), c10::ValueError);
  CHECK_THROWS_WITH(rows_of(Example(rows(4), rows(3))), Catch::Contains("(rows: 4 and 3)"));
  CHECK_THROWS_WITH(rows_of(std::vector<at::Tensor>{rows(2), rows(2), rows(1)}),
                    Catch::Contains("(rows: 2 and 1)"));
  CHECK_THROWS_WITH(rows_of(std::pair(rows(2), rows(5))), Catch::Contains("(rows: 2 and 5)"));
}
