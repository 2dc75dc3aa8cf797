#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <torch/data/example.h>
#include "support/catch.h"

#include <brimful/sizer/split.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

namespace test_split {

using brimful::Along;
using brimful::rows_of;
using brimful::Shared;
using brimful::slice_rows;

namespace user {
/// Sequences end to end; a row is one of them.
struct Flat {
  at::Tensor values;
  std::vector<int64_t> begins;
};
int64_t rows_of(const Flat& batch) {
  return static_cast<int64_t>(batch.begins.size()) - 1;
}
Flat slice_rows(const Flat& batch, int64_t begin, int64_t end) {
  const auto first = batch.begins[begin];
  Flat piece{batch.values.slice(0, first, batch.begins[end]), {}};
  for (auto i = begin; i <= end; ++i) {
    piece.begins.push_back(batch.begins[i] - first);
  }
  return piece;
}
}  // namespace user

namespace {
struct Example {
  Example(at::Tensor d, at::Tensor t) : data(std::move(d)), target(std::move(t)) {}
  at::Tensor data;
  at::Tensor target;
};

struct Plain {
  at::Tensor data;
  at::Tensor target;
};

struct Weighted {
  at::Tensor data;
  at::Tensor target;
  at::Tensor weights;
};

at::Tensor rows(int64_t count) {
  return at::arange(count);
}

static_assert(brimful::detail::Structure<Example> && brimful::detail::Structure<Plain>);
static_assert(!brimful::detail::Structure<Weighted>, "a piece would lose the weights");
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

  const std::vector<std::map<std::string, std::tuple<at::Tensor>>> deep{{{"x", {rows(4)}}}};
  CHECK(rows_of(deep) == 4);
  CHECK(at::equal(std::get<0>(slice_rows(deep, 1, 3)[0].at("x")), at::arange(1, 3)));

  const std::unordered_map<int, std::optional<at::Tensor>> maybe{{1, rows(4)}, {2, std::nullopt}};
  CHECK(rows_of(maybe) == 4);
  CHECK(at::equal(*slice_rows(maybe, 2, 4).at(1), at::arange(2, 4)));
  CHECK_FALSE(slice_rows(maybe, 2, 4).at(2));
}

TEST_CASE("Every split of a batch is the batch when it is put together", "[sizer]") {
  const auto dense = at::arange(15.).view({5, 3}) - 4;
  const auto sparse = dense.relu();
  const std::map<std::string, at::Tensor> batch{
      {"dense", dense},
      {"coo", sparse.to_sparse()},
      {"coo, one sparse dimension", sparse.to_sparse(1)},
      {"csr", sparse.to_sparse_csr()},
      {"no entries", at::zeros({5, 3}).to_sparse_csr()},
  };
  REQUIRE(rows_of(batch) == 5);
  for (int cuts = 0; cuts < 16; ++cuts) {
    std::map<std::string, std::vector<at::Tensor>> pieces;
    int64_t begin = 0;
    for (int64_t end = 1; end <= 5; ++end) {
      if (end < 5 && (cuts >> (end - 1) & 1) == 0) {
        continue;
      }
      const auto piece = slice_rows(batch, begin, end);
      CHECK(rows_of(piece) == end - begin);
      for (const auto& [name, tensor] : piece) {
        CHECK(tensor.layout() == batch.at(name).layout());
        pieces[name].push_back(tensor.to_dense());
      }
      begin = end;
    }
    for (const auto& [name, tensor] : batch) {
      INFO(name << ", cuts: " << cuts);
      CHECK(at::equal(at::cat(pieces[name]), tensor.to_dense()));
    }
  }
}

TEST_CASE("Parts without rows are in every piece", "[sizer]") {
  const std::tuple batch{rows(3),      std::string("abc"), 7,
                         at::ones({}), at::Tensor(),       std::vector<std::string>{"x", "y"}};
  CHECK(rows_of(batch) == 3);
  const auto [x, text, number, scale, nothing, words] = slice_rows(batch, 1, 2);
  CHECK(at::equal(x, at::full({1}, 1, at::kLong)));
  CHECK(text == "abc");
  CHECK(number == 7);
  CHECK(at::equal(scale, at::ones({})));
  CHECK_FALSE(nothing.defined());
  CHECK(words == std::vector<std::string>{"x", "y"});
}

TEST_CASE("Vectors of strings and of numbers say that equally long samples are rows", "[sizer]") {
  const std::vector<at::Tensor> waves{rows(50), rows(50), rows(50), rows(50)};
  const std::vector<std::vector<int64_t>> tokens{{1}, {2, 3}, {4}, {5}};
  const auto check = [&](const auto& beside) {
    const std::pair batch{waves, beside};
    CHECK(rows_of(batch) == 4);
    const auto [some, rest] = slice_rows(batch, 1, 3);
    CHECK(some.size() == 2);
    CHECK(some[0].size(0) == 50);
    CHECK(rest.size() == 2);
    CHECK(rest[0] == beside[1]);
  };
  check(std::vector<std::string>{"a", "b", "c", "d"});
  check(tokens);
  CHECK_THROWS_AS(rows_of(waves), c10::ValueError);  // alone: time, or rows
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("waves", c10::List<at::Tensor>({rows(50), rows(50)}));
  dict.insert("texts", c10::List<std::string>({"a", "b"}));
  CHECK(rows_of(c10::IValue(dict)) == 2);
}

TEST_CASE("A vector with a string, number or Example for each row is cut", "[sizer]") {
  const std::tuple batch{rows(3), std::vector<std::string>{"a", "b", "c"},
                         std::vector<int64_t>{1, 2, 3}};
  const auto [x, words, numbers] = slice_rows(batch, 1, 3);
  CHECK(words == std::vector<std::string>{"b", "c"});
  CHECK(numbers == std::vector<int64_t>{2, 3});

  using Stacked = torch::data::Example<>;
  const std::vector<Stacked> samples(4, Stacked(rows(3), at::ones({})));
  CHECK(rows_of(samples) == 4);
  CHECK(slice_rows(samples, 1, 4).size() == 3);
  CHECK(at::equal(slice_rows(samples, 1, 4)[0].data, rows(3)));
  CHECK(rows_of(std::vector<Stacked>{}) == 0);
}

TEST_CASE("Examples of torch::data are split", "[sizer]") {
  const torch::data::Example<> pair(rows(4), rows(4) * 2);
  CHECK(rows_of(pair) == 4);
  CHECK(at::equal(slice_rows(pair, 1, 3).target, at::arange(2, 6, 2)));
  const torch::data::TensorExample single(rows(4));
  CHECK(rows_of(single) == 4);
  CHECK(at::equal(slice_rows(single, 1, 3).data, at::arange(1, 3)));

  const torch::data::Example<std::vector<at::Tensor>, std::pair<at::Tensor, std::string>> nested(
      {rows(4), rows(4) + 1}, {rows(4), "name"});
  CHECK(rows_of(nested) == 4);
  CHECK(at::equal(slice_rows(nested, 3, 4).data[1], at::full({1}, 4, at::kLong)));
}

TEST_CASE("Rows along another dimension, and parts that have none, are named by types", "[sizer]") {
  const auto sequence = at::arange(12).view({2, 3, 2});
  const std::tuple batch{Along{sequence, 1}, Along{sequence, -2}, rows(3), Shared{rows(9)}};
  CHECK(rows_of(batch) == 3);
  const auto [x, from_end, y, table] = slice_rows(batch, 1, 3);
  CHECK(at::equal(x.tensor, sequence.slice(1, 1, 3)));
  CHECK(x.dim == 1);
  CHECK(at::equal(from_end.tensor, x.tensor));
  CHECK(at::equal(y, at::arange(1, 3)));
  CHECK(table.value.size(0) == 9);
  CHECK_THROWS_WITH(rows_of(Along{rows(3), 1}), Catch::Contains("(dim: 1, shape: [3])"));
  CHECK_THROWS_AS(rows_of(Along{rows(3), 1}), c10::ValueError);
}

TEST_CASE("A type of the user's is split by the functions beside it", "[sizer]") {
  const std::pair batch{user::Flat{rows(6), {0, 1, 3, 6}}, rows(3)};
  CHECK(rows_of(batch) == 3);
  const auto piece = slice_rows(batch, 1, 3);
  CHECK(at::equal(piece.first.values, at::arange(1, 6)));
  CHECK(piece.first.begins == std::vector<int64_t>{0, 2, 5});
  CHECK(rows_of(batch.first) == 3);
  CHECK_THROWS_WITH(rows_of(std::pair(batch.first, rows(4))), Catch::Contains("(rows: 3 and 4)"));
}

TEST_CASE("What may have rows in an IValue, and is not cut, is refused", "[sizer]") {
  const auto hidden = c10::IValue::make_capsule(c10::make_intrusive<torch::CustomClassHolder>());
  const c10::IValue batch(c10::ivalue::Tuple::create(rows(3), hidden));
  CHECK_THROWS_WITH(rows_of(batch), Catch::Contains("(type: Capsule)"));
  CHECK_THROWS_AS(rows_of(batch), c10::TypeError);
  const std::pair said{c10::IValue(rows(3)), Shared{hidden}};
  CHECK(rows_of(said) == 3);
}

TEST_CASE("Structures in an IValue are split", "[sizer]") {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("x", rows(3));
  dict.insert("list", c10::List<at::Tensor>({rows(3), rows(3) * 2}));
  dict.insert("four", c10::List<at::Tensor>({rows(3), rows(3), rows(3), rows(3)}));
  dict.insert("samples", c10::List<at::Tensor>({rows(5), rows(5), rows(5) + 5}));
  dict.insert("words", c10::List<std::string>({"a", "b", "c"}));
  dict.insert("two", c10::List<int64_t>({1, 2}));
  dict.insert("tuple", c10::ivalue::Tuple::create(rows(3) + 5, "text", c10::IValue()));
  dict.insert("scale", at::ones({}));
  const c10::IValue batch(dict);
  CHECK(rows_of(batch) == 3);

  const auto piece = slice_rows(batch, 1, 3).toGenericDict();
  CHECK(piece.size() == dict.size());
  CHECK(at::equal(piece.at("x").toTensor(), at::arange(1, 3)));
  CHECK(piece.at("list").isTensorList());
  CHECK(at::equal(piece.at("list").toTensorVector()[1], at::arange(2, 6, 2)));
  CHECK(piece.at("four").toTensorVector().size() == 4);
  CHECK(piece.at("samples").isTensorList());
  CHECK(piece.at("samples").toTensorVector().size() == 2);
  CHECK(at::equal(piece.at("samples").toTensorVector()[1], at::arange(5, 10)));
  CHECK(piece.at("words").toListRef()[0].toStringRef() == "b");
  CHECK(piece.at("words").toListRef().size() == 2);
  CHECK(piece.at("two").toIntVector() == std::vector<int64_t>{1, 2});
  const auto& elements = piece.at("tuple").toTupleRef().elements();
  CHECK(at::equal(elements[0].toTensor(), at::arange(6, 8)));
  CHECK(elements[1].toStringRef() == "text");
  CHECK(elements[2].isNone());
  CHECK(at::equal(piece.at("scale").toTensor(), at::ones({})));
  CHECK(dict.at("x").toTensor().size(0) == 3);

  const auto type = c10::TupleType::createNamed(
      c10::QualifiedName("__torch__.Pair"), std::vector<std::string>{"x", "y"},
      std::vector<c10::TypePtr>{c10::TensorType::get(), c10::TensorType::get()});
  const c10::IValue named(c10::ivalue::Tuple::createNamed({rows(3), rows(3)}, type));
  CHECK(slice_rows(named, 0, 1).toTupleRef().type()->name()->name() == "Pair");

  CHECK_THROWS_WITH(rows_of(c10::IValue(c10::List<at::Tensor>({rows(3), rows(2)}))),
                    Catch::Contains("list number 0: 2 entries of several sizes"));
  CHECK_THROWS_AS(rows_of(c10::IValue("text")), c10::ValueError);
}

TEST_CASE("Parts that disagree in size are refused with both sizes", "[sizer]") {
  CHECK_THROWS_AS(rows_of(Example(rows(4), rows(3))), c10::ValueError);
  CHECK_THROWS_WITH(rows_of(Example(rows(4), rows(3))), Catch::Contains("(rows: 4 and 3)"));
  CHECK_THROWS_WITH(rows_of(std::vector<at::Tensor>{rows(2), rows(2), rows(1)}),
                    Catch::Contains("(rows: 2, list number 0: 3 entries of several sizes)"));
  CHECK_THROWS_WITH(rows_of(std::pair(rows(2), rows(5))), Catch::Contains("(rows: 2 and 5)"));
}

TEST_CASE("A vector of samples has a row in each entry", "[sizer]") {
  const std::vector<at::Tensor> images(7, at::ones({3, 4, 4}));
  const std::vector<at::Tensor> sequences{rows(2), rows(5), rows(1)};
  const std::tuple batch{images, rows(7), std::vector<int64_t>(7, 1)};
  CHECK(rows_of(batch) == 7);
  CHECK(std::get<0>(slice_rows(batch, 2, 6)).size() == 4);
  CHECK(std::get<0>(slice_rows(batch, 2, 6))[0].sizes() == at::IntArrayRef{3, 4, 4});
  CHECK(std::get<0>(slice_rows(std::pair(sequences, rows(3)), 1, 3))[0].size(0) == 5);
  CHECK(rows_of(std::pair(images, std::vector<int64_t>(7, 1))) == 7);

  const std::vector<at::Tensor> columns(3, rows(9));
  CHECK(rows_of(columns) == 9);
  CHECK(slice_rows(columns, 1, 3).size() == 3);
  const std::vector<at::Tensor> more(4, rows(9));
  CHECK_THROWS_WITH(rows_of(more), Catch::Contains("4 tensors of 9 rows each if they are columns"));
  CHECK(slice_rows(std::pair(more, rows(9)), 1, 3).first[3].size(0) == 2);
  CHECK(rows_of(std::vector<at::Tensor>(2, rows(1))) == 1);

  CHECK_THROWS_AS(rows_of(images), c10::ValueError);
  CHECK_THROWS_WITH(rows_of(images), Catch::Contains("(list number 0: 7 tensors of 3 rows each"));
  CHECK_THROWS_WITH(rows_of(std::pair(std::vector<at::Tensor>(4, rows(4)), rows(4))),
                    Catch::Contains("4 tensors of 4 rows each"));
  CHECK_THROWS_WITH(rows_of(std::pair(sequences, rows(4))),
                    Catch::Contains("(rows: 4, list number 0: 3 entries of several sizes)"));
}

TEST_CASE("What has no rows to split is refused", "[sizer]") {
  CHECK_THROWS_AS(rows_of(std::vector<at::Tensor>{}), c10::ValueError);
  CHECK_THROWS_WITH(rows_of(std::pair(std::string("x"), at::ones({}))),
                    Catch::Contains("no tensor that has a dimension to split"));
  CHECK_THROWS_AS(slice_rows(at::eye(3).to_sparse_csc(), 0, 1), c10::TypeError);
  CHECK_THROWS_WITH(slice_rows(at::eye(3).to_sparse_csc(), 0, 1), Catch::Contains("SparseCsc"));
  CHECK_THROWS_AS(slice_rows(Along{at::eye(3).to_sparse_csr(), 1}, 0, 1), c10::TypeError);
}

}  // namespace test_split
