#include <ATen/ATen.h>
#include "support/catch.h"
#include "support/sizer_test.h"

#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/map_batches.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>

namespace test_map_batches {

using namespace brimful;
using namespace brimful::test;

namespace {

using Sizes = std::vector<int64_t>;

const c10::Device kCpu(c10::DeviceType::CPU);
constexpr int64_t kRows = 13;

int64_t used() {
  return memory::stats(kCpu).used_bytes;
}

at::Tensor batch_of_rows(int64_t rows = kRows) {
  return at::arange(rows * 3, at::kDouble).view({rows, 3});
}

/// Holds as much for a row as the tests' budgets are counted in.
constexpr int64_t kRowBytes = 1 << 16;

/// Whole numbers, so that a result has the same bits in whatever pieces it was made.
at::Tensor heavy(const at::Tensor& x) {
  const auto wide = at::empty({x.size(0), kRowBytes}, at::kByte);
  return x * 2 + 1;
}

/// What may be used beyond now, while it lives.
struct Budget {
  explicit Budget(int64_t bytes) {
    brimful::detail::forget_map_sizes();
    memory::set_limit(kCpu, used() + bytes);
  }
  ~Budget() { memory::set_limit(kCpu, std::nullopt); }
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;
};

/// `heavy`, with a note of the sizes that it was called with.
auto noting(Sizes& sizes) {
  return [&sizes](const at::Tensor& x) {
    sizes.push_back(x.size(0));
    return heavy(x);
  };
}

}  // namespace

TEST_CASE("A batch that fits is mapped whole, and its result is the function's own", "[sizer]") {
  const auto batch = batch_of_rows();
  batch.set_requires_grad(true);
  at::Tensor own;
  const auto result = map_batches(
      [&](const at::Tensor& x) {
        CHECK_FALSE(at::GradMode::is_enabled());
        return own = x * 2;
      },
      batch);
  CHECK(result.is_same(own));
  CHECK_FALSE(result.requires_grad());
  CHECK(at::GradMode::is_enabled());
}

TEST_CASE("A batch is mapped in pieces that fit, and their size is kept for the call", "[sizer]") {
  const Quiet quiet;
  const auto batch = batch_of_rows();
  const auto expected = heavy(batch);
  Sizes sizes;
  const auto before = used();
  {
    const Budget budget(5 * kRowBytes);
    const auto result = map_batches(noting(sizes), batch);
    CHECK(at::equal(result, expected));
    CHECK(result.is_contiguous());
  }
  CHECK(sizes == Sizes{13, 7, 4, 4, 4, 1});
  CHECK(used() == before);
  CHECK(memory::stats(kCpu).limit_bytes == std::nullopt);
}

TEST_CASE("Pieces may be asked for, and more of them than rows are as many as rows", "[sizer]") {
  const auto batch = batch_of_rows(5);
  Sizes sizes;
  MapOptions options;
  options.pieces = 2;
  CHECK(at::equal(map_batches(noting(sizes), batch, options), heavy(batch)));
  CHECK(sizes == Sizes{3, 2});
  sizes.clear();
  options.pieces = 50;
  CHECK(at::equal(map_batches(noting(sizes), batch, options), heavy(batch)));
  CHECK(sizes == Sizes{1, 1, 1, 1, 1});
}

TEST_CASE("Results keep their structure and their memory format", "[sizer]") {
  using Pair = std::pair<at::Tensor, std::vector<at::Tensor>>;
  using Named = std::map<std::string, Pair>;
  const auto fn = [](const std::pair<at::Tensor, at::Tensor>& piece) {
    const auto& [x, y] = piece;
    const auto image = x.view({x.size(0), 3, 1, 1})
                           .expand({-1, -1, 2, 2})
                           .contiguous(at::MemoryFormat::ChannelsLast);
    return std::tuple<Named, std::array<at::Tensor, 1>>{
        Named{{"a", {x + 1, {y, image}}}, {"b", {y * 2, {}}}}, {y.to(at::kByte)}};
  };
  const std::pair<at::Tensor, at::Tensor> batch{batch_of_rows(), at::arange(kRows)};
  MapOptions options;
  options.pieces = 4;
  const auto [named, bytes] = map_batches(fn, batch, options);
  const auto [expected, expected_bytes] = fn(batch);
  REQUIRE(named.size() == 2);
  CHECK(at::equal(named.at("a").first, expected.at("a").first));
  REQUIRE(named.at("a").second.size() == 2);
  CHECK(at::equal(named.at("a").second[0], expected.at("a").second[0]));
  CHECK(at::equal(named.at("a").second[1], expected.at("a").second[1]));
  CHECK(named.at("a").second[1].is_contiguous(at::MemoryFormat::ChannelsLast));
  CHECK(at::equal(named.at("b").first, expected.at("b").first));
  CHECK(at::equal(bytes[0], expected_bytes[0]));
  CHECK(bytes[0].scalar_type() == at::kByte);
}

TEST_CASE("A row that does not fit is reported with the sizes tried", "[sizer]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(6);
  const auto before = used();
  const auto caught = catching([&] {
    const Budget budget(kRowBytes / 2);
    map_batches(heavy, batch);
  });
  CHECK(caught.type == Type::batch_too_large);
  CHECK_THAT(caught.text,
             Catch::StartsWith("a piece of one row does not fit on rank 0 of 1 (device: cpu, rows: "
                               "6, done: 0, retries: 3, max_retries: 8).\nTried: 1 piece of 6 rows "
                               "(peak: ") &&
                 Catch::Contains("3 pieces of 2 rows (peak: ") &&
                 Catch::Contains("Try next: 1. raise the memory limit"));
  CHECK(used() == before);
  MapOptions options;
  options.max_retries = 1;
  const auto sooner = catching([&] {
    const Budget budget(kRowBytes / 2);
    map_batches(heavy, batch, options);
  });
  CHECK(sooner.type == Type::batch_too_large);
  CHECK_THAT(sooner.text,
             Catch::StartsWith("no piece that was tried fits on rank 0 of 1 (device: cpu, rows: 6, "
                               "done: 0, retries: 1, max_retries: 1)") &&
                 Catch::Contains("1. raise max_retries, or begin with more pieces (pieces=4)"));
}

TEST_CASE("A row that does not fit beside the results of others is reported with its bytes",
          "[sizer]") {
  const Quiet quiet;
  const auto weight = at::zeros({100}, at::kFloat);
  MapOptions options;
  options.pieces = 6;
  options.rank = 1;
  options.world_size = 3;
  options.standing_bytes = [&] { return standing_bytes({weight}, {}, kCpu); };
  int calls = 0;
  const auto before = used();
  const Budget budget(2 * kRowBytes);
  try {
    map_batches(
        [&](const at::Tensor& x) {
          const auto more = at::empty({++calls == 4 ? 4 * kRowBytes : 0}, at::kByte);
          return heavy(x);
        },
        batch_of_rows(6), options);
    FAIL("nothing was thrown");
  } catch (const BatchTooLarge& error) {
    const auto& facts = error.facts();
    CHECK(facts.rank == 1);
    REQUIRE(facts.tried.size() == 1);
    CHECK(facts.tried[0].piece_rows == 1);
    int64_t sum = 0;
    for (const auto& [name, bytes] : facts.bytes) {
      sum += bytes;
    }
    CHECK(sum == facts.tried[0].peak_bytes);
    CHECK(facts.bytes.front() == std::pair<std::string, int64_t>("parameters", 400));
    CHECK(facts.limit_bytes == before + 2 * kRowBytes);
    CHECK_THAT(error.what_without_backtrace(), Catch::Contains("on rank 1 of 3 (device: cpu, rows: "
                                                               "6, done: 3"));
  }
}

TEST_CASE("Torch's cache is released where that helps, and the same piece tried once more",
          "[sizer]") {
  const Quiet quiet;
  const std::string fragmented =
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
      "which 512.00 MiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and "
      "3.00 GiB is reserved by PyTorch but unallocated.";
  const auto sizes_with = [&](int failures, const std::string& words) {
    Sizes sizes;
    brimful::detail::forget_map_sizes();
    map_batches(
        [&](const at::Tensor& x) {
          sizes.push_back(x.size(0));
          TORCH_CHECK_WITH(OutOfMemoryError, failures-- <= 0, words);
          return x;
        },
        batch_of_rows());
    return sizes;
  };
  CHECK(sizes_with(1, fragmented) == Sizes{13, 13});
  CHECK(sizes_with(2, fragmented) == Sizes{13, 13, 7, 6});
  CHECK(sizes_with(1, "CPU out of memory. Tried to allocate 2.0 GiB.") == Sizes{13, 7, 6});
}

TEST_CASE("A piece that is repeated gets the same random numbers", "[sizer]") {
  const Quiet quiet;
  const auto batch = batch_of_rows();
  const auto dropout = [](const at::Tensor& x) {
    const auto dropped = at::dropout(x, 0.5, true);
    const auto wide = at::empty({x.size(0), kRowBytes}, at::kByte);
    return dropped * at::rand({x.size(0), 1}, at::kDouble);
  };
  int64_t number = 3;
  MapOptions options;
  const auto kept = std::make_shared<int64_t>();
  options.keepers = {{[kept, &number] { *kept = number; }, [kept, &number] { number = *kept; }}};
  const auto counting = [&](const at::Tensor& x) {
    number += 1;
    return dropout(x) + static_cast<double>(number);
  };
  at::manual_seed(5);
  at::Tensor retried;
  {
    const Budget budget(5 * kRowBytes);
    retried = map_batches(counting, batch, options);
  }
  at::manual_seed(5);
  number = 3;
  options.pieces = 4;
  CHECK(at::equal(retried, map_batches(counting, batch, options)));
  CHECK(number == 7);
}

TEST_CASE("A piece that is repeated counts once in the buffers of the modules that are named",
          "[sizer]") {
  const Budget budget(4 * kRowBytes);
  const bool named = GENERATE(true, false);
  auto seen = at::zeros({}, at::kLong);
  MapOptions options;
  if (named) {
    options.names = names_of([&] { return std::vector<at::Tensor>{seen}; });
  }
  int calls = 0;
  const auto fn = [&](const at::Tensor& x) {
    ++calls;
    seen.add_(x.size(0));
    return heavy(x);
  };
  map_batches(fn, batch_of_rows(), options);
  CHECK(calls > 4);
  CHECK((seen.item<int64_t>() == kRows) == named);
}

TEST_CASE("Results that do not fit together are refused", "[sizer]") {
  MapOptions options;
  options.pieces = 2;
  const auto batch = batch_of_rows(6);
  const auto caught = [&](const auto& fn) {
    return catching([&] { map_batches(fn, batch, options); });
  };
  const auto later = [](const at::Tensor& x) { return x[0][0].item<double>() > 0; };

  const auto fewer = caught([](const at::Tensor& x) { return x.slice(0, 1); });
  CHECK(fewer.type == Type::value_error);
  CHECK_THAT(fewer.text,
             Catch::StartsWith("fn returned a wrong number of rows (tensor of the result: 0, "
                               "shape: [2, 3], rows of the piece: 3)"));
  CHECK(caught([](const at::Tensor& x) { return x.sum(); }).type == Type::value_error);
  CHECK(caught([](const at::Tensor& x) { return x.to_sparse(); }).type == Type::type_error);
  CHECK(caught([](const at::Tensor&) { return at::Tensor(); }).type == Type::type_error);
  CHECK(caught([](const at::Tensor&) { return std::vector<at::Tensor>(); }).type ==
        Type::type_error);

  const auto shape = caught([&](const at::Tensor& x) { return later(x) ? x.slice(1, 1) : x; });
  CHECK(shape.type == Type::value_error);
  CHECK_THAT(shape.text,
             Catch::Contains("rows 3 to 6") && Catch::Contains("shape: [3, 2] and [*, [3]]"));
  const auto dtype = caught([&](const at::Tensor& x) { return later(x) ? x.to(at::kFloat) : x; });
  CHECK(dtype.type == Type::value_error);
  CHECK_THAT(dtype.text, Catch::Contains("dtype: float and double"));
  const auto count =
      caught([&](const at::Tensor& x) { return std::vector<at::Tensor>(later(x) ? 2 : 1, x); });
  CHECK(count.type == Type::value_error);
  CHECK_THAT(count.text, Catch::Contains("(tensors: 2 and 1)"));
}

TEST_CASE("Bad input of a mapping is refused, and what the function throws passes", "[sizer]") {
  const auto batch = batch_of_rows();
  const auto with = [&](int64_t pieces, int64_t max_retries) {
    MapOptions options;
    options.pieces = pieces;
    options.max_retries = max_retries;
    return catching([&] { map_batches(heavy, batch, options); });
  };
  CHECK_THAT(with(0, 8).text, Catch::Contains("(pieces: 0)"));
  CHECK(with(0, 8).type == Type::value_error);
  CHECK_THAT(with(1, -1).text, Catch::Contains("(max_retries: -1)"));
  CHECK(with(1, -1).type == Type::value_error);
  CHECK(catching([&] { map_batches(heavy, batch_of_rows(0)); }).type == Type::value_error);
  int calls = 0;
  const auto own = catching([&] {
    map_batches(
        [&](const at::Tensor& x) {
          ++calls;
          throw std::runtime_error("planted");
          return x;
        },
        batch);
  });
  CHECK(own.type == Type::runtime_error);
  CHECK(own.text == "planted");
  CHECK(calls == 1);
}

TEST_CASE("An allocation refused anywhere in a mapping changes nothing in its result",
          "[sizer][faults]") {
  const Quiet quiet;
  const auto fn = [](const std::pair<at::Tensor, at::Tensor>& piece) {
    return std::pair<at::Tensor, at::Tensor>{heavy(piece.first), heavy(piece.second)};
  };
  const std::pair<at::Tensor, at::Tensor> batch{batch_of_rows(), batch_of_rows()};
  const auto expected = fn(batch);
  MapOptions options;
  options.pieces = GENERATE(1, 3);
  const auto before = used();
  int64_t index = 0;
  for (bool fired = true; fired; ++index) {
    CAPTURE(index);
    REQUIRE(index < 200);
    const memory::FaultAt fault(index);
    {
      const auto result = map_batches(fn, batch, options);
      fired = fault.fired();
      REQUIRE(at::equal(result.first, expected.first));
      REQUIRE(at::equal(result.second, expected.second));
    }
    REQUIRE(used() == before);
  }
  CHECK(index > (options.pieces == 1 ? 6 : 18));
}

TEST_CASE("Later calls begin with the size that fitted, and it grows again", "[sizer]") {
  const Quiet quiet;
  const auto batch = batch_of_rows();
  const auto expected = heavy(batch);
  Sizes sizes;
  {
    const Budget budget(5 * kRowBytes);
    map_batches(noting(sizes), batch);
    CHECK(sizes == Sizes{13, 7, 4, 4, 4, 1});
    for (int call = 0; call < 5; ++call) {
      sizes.clear();
      CHECK(at::equal(map_batches(noting(sizes), batch), expected));
      CHECK(sizes == Sizes{4, 4, 4, 1});
    }
    sizes.clear();  // of rows that are twice as long
    map_batches(noting(sizes), at::cat({batch, batch}, 1));
    CHECK(sizes.front() == 2);
    int64_t refused = 0;
    for (int call = 0; call < 100; ++call) {
      sizes.clear();
      map_batches(noting(sizes), batch);
      refused += sizes.front() > 4 ? 1 : 0;
    }
    CHECK(refused <= 4);
    memory::set_limit(kCpu, used() + 8 * kRowBytes);
    for (int call = 0; call < 3; ++call) {
      sizes.clear();
      map_batches(noting(sizes), batch);
    }
    CHECK(sizes.front() == 7);
  }
  sizes.clear();
  map_batches(noting(sizes), batch);
  CHECK(sizes == Sizes{13});
}

TEST_CASE("A size grows again within a call, and what failed is not tried again at once",
          "[sizer]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(400);
  MapOptions options;
  options.pieces = 10;
  Sizes sizes;
  int64_t most = 30;  // rows that fit
  const auto fn = [&](const at::Tensor& x) {
    sizes.push_back(x.size(0));
    TORCH_CHECK_WITH(OutOfMemoryError, x.size(0) <= most, "planted");
    return x;
  };
  brimful::detail::forget_map_sizes();
  SECTION("what took the memory has gone") {
    map_batches(
        [&](const at::Tensor& x) {
          const auto y = fn(x);
          most = 400;
          return y;
        },
        batch, options);
    CHECK(Sizes(sizes.begin(), sizes.begin() + 2) == Sizes{40, 20});
    const auto largest = *std::max_element(sizes.begin() + 2, sizes.end());
    CHECK(largest > 30);
    CHECK(largest < 40);
  }
  SECTION("it stays") {
    for (int call = 0; call < 10; ++call) {
      map_batches(fn, batch, options);
    }
    const auto refused = std::count_if(sizes.begin(), sizes.end(), [](auto n) { return n > 30; });
    CHECK(refused >= 3);
    CHECK(refused <= 10);
    CHECK(sizes.front() == 40);
    CHECK(*(sizes.end() - 2) == 29);
  }
  brimful::detail::forget_map_sizes();
}

TEST_CASE("A row of a thousand that fits is found within the retries", "[sizer]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(1000);
  const auto expected = batch * 2 + 1;
  Sizes sizes;
  const Budget budget(3 * kRowBytes / 2);
  CHECK(at::equal(map_batches(noting(sizes), batch), expected));
  CHECK(sizes.back() == 1);
}

}  // namespace test_map_batches
