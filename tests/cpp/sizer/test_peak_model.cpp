#include "sizer/peak_model.h"
#include "support/catch.h"

#include "sizer/align_traces.h"

#include <algorithm>
#include <vector>

namespace test_peak_model {

using brimful::PeakModel;
using brimful::TracedRows;
using brimful::memory::peak_bytes;
using brimful::memory::Trace;

namespace {
/// Parameters' gradients, an activation that grows with the rows, and a workspace whose moment is the fullest at few rows.
Trace affine(int64_t rows) {
  return {100 * rows, 5000,        -5000, 40 * rows + 16,   30 * rows,
          -30 * rows, -100 * rows, 200,   -(40 * rows + 16)};
}

/// The same with an activation that is rounded up to pages.
Trace paged(int64_t rows) {
  const int64_t bytes = (1500 * rows + 4095) / 4096 * 4096;
  return {100 * rows, bytes, 40 * rows, -bytes, -40 * rows, -100 * rows};
}

std::optional<PeakModel> fit(Trace (*trace)(int64_t), const std::vector<int64_t>& sizes) {
  std::vector<TracedRows> traces;
  for (const auto rows : sizes) {
    traces.push_back({rows, trace(rows)});
  }
  return PeakModel::fit(std::move(traces));
}
}  // namespace

TEST_CASE("The peak of an affine piece is exact at every size, whatever moment is the fullest",
          "[sizer]") {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 3}, {8, 2, 3}, {1, 5}}) {
    const auto model = fit(affine, sizes);
    REQUIRE(model);
    CHECK(model->off_line() == 0);
    for (const int64_t rows : {1, 2, 7, 60, 70, 71, 72, 80, 1000, 100000}) {
      CHECK(model->peak_bytes(rows) == peak_bytes(affine(rows)));
    }
  }
}

TEST_CASE("What a library rounds up is predicted too large rather than too small", "[sizer]") {
  const auto model = fit(paged, {2, 3, 8});
  REQUIRE(model);
  CHECK(model->off_line() > 0.1);
  for (const int64_t rows : {16, 40, 333, 1600}) {
    const auto real = static_cast<double>(peak_bytes(paged(rows)));
    const auto predicted = static_cast<double>(model->peak_bytes(rows));
    CHECK(predicted >= real);
    CHECK(predicted <= 1.35 * real + 4 * 4096);
  }
}

TEST_CASE(
    "A workspace that jumps on CUDA is as large behind the smaller of two sizes as at the larger",
    "[sizer]") {
  const auto scratch = [](int64_t rows) { return rows < 4 ? rows : 1000 * rows; };
  std::vector<TracedRows> traces;
  for (const int64_t rows : {2, 3, 16}) {
    traces.push_back({rows, {100 * rows, scratch(rows), -scratch(rows), -100 * rows}});
    traces.back().blocks = {{0, -1}, {0, -1}, {0, 1}, {0, 0}};
  }
  const auto model = PeakModel::fit(std::move(traces));
  REQUIRE(model);
  CHECK(model->off_line() > 0.9);
  for (const int64_t rows : {4, 5, 9, 15, 16, 17, 200}) {
    CHECK(model->peak_bytes(rows) >= 100 * rows + scratch(rows));
  }
  for (const int64_t rows : {2, 3, 16, 64}) {
    CHECK(model->peak_bytes(rows) == 100 * rows + scratch(rows));
  }
}

TEST_CASE("The most rows that fit are those of a search through all of them", "[sizer]") {
  const auto model = fit(affine, {2, 3});
  REQUIRE(model);
  for (const int64_t bytes : {0, 155, 156, 5000, 5100, 5300, 20000}) {
    int64_t most = 0;
    while (most < 50 && peak_bytes(affine(most + 1)) <= bytes) {
      ++most;
    }
    CHECK(model->largest_rows(bytes, 50) == most);
  }
}

TEST_CASE("Other sequences of allocations make no model, unless their peak is the same",
          "[sizer]") {
  const auto with = [](int64_t rows, Trace trace) { return TracedRows{rows, std::move(trace)}; };
  CHECK_FALSE(PeakModel::fit({with(2, {1, -1}), with(3, {1, 1})}));
  CHECK_FALSE(PeakModel::fit({with(2, {1}), with(3, {1, -1})}));
  const auto two = with(2, {2000, -2000});
  const auto three = with(3, {3000, -3000});
  const auto same = PeakModel::fit({two, three, with(8, {10, -10, 8000, -8000})});
  REQUIRE(same);
  CHECK(same->peak_bytes(100) == 100000);
  CHECK_FALSE(PeakModel::fit({two, three, with(8, {10, -10, 8100, -8100})}));
}

namespace {
/// 200 layers that hold their outputs until the end. From 3 rows on, two threads share the work of every 50th one, and
/// each takes a buffer of its own; `per_row` says how that grows.
Trace threaded(int64_t rows, int64_t per_row, int64_t constant) {
  Trace trace;
  for (int64_t layer = 1; layer <= 200; ++layer) {
    trace.push_back(1000 * rows);
    if (layer % 50 == 0 && rows >= 3) {
      const auto buffer = per_row * rows + constant;
      trace.insert(trace.end(), {buffer, 16, -buffer, 16, -16, -16});
    }
  }
  for (int64_t layer = 200; layer > 0; --layer) {
    trace.push_back(-1000 * rows);
  }
  return trace;
}
}  // namespace

TEST_CASE("Buffers that threads take from some size on are part of the model", "[sizer]") {
  const auto fit = [](int64_t per_row, int64_t constant, const std::vector<int64_t>& sizes) {
    std::vector<TracedRows> traces;
    for (const auto rows : sizes) {
      traces.push_back({rows, threaded(rows, per_row, constant)});
    }
    return PeakModel::fit(std::move(traces));
  };
  const auto check = [](const std::optional<PeakModel>& model, int64_t per_row, int64_t constant,
                        double most) {
    REQUIRE(model);
    for (const int64_t rows : {24, 80, 400, 1600}) {
      const auto real = static_cast<double>(peak_bytes(threaded(rows, per_row, constant)));
      const auto told = static_cast<double>(model->peak_bytes(rows));
      CHECK(told >= real);
      CHECK(told <= most * real + 4 * 8192);
    }
  };
  // In proportion to the rows: one size that has them is enough.
  check(fit(90000, 0, {2, 3}), 90000, 0, 1.0);
  check(fit(90000, 0, {2, 3, 16}), 90000, 0, 1.0);
  // A part does not grow: two sizes show which.
  check(fit(1000, 2000000, {2, 3, 16}), 1000, 2000000, 1.001);
  check(fit(0, 2000000, {2, 16, 32}), 0, 2000000, 1.001);
  // What one size alone has is taken to grow with the rows: too large rather than too small.
  check(fit(0, 20000, {2, 16}), 0, 20000, 1.2);
}

TEST_CASE("Events of a size that no other has are not forced upon one another", "[sizer]") {
  // The second has a larger temporary in front of an equal one: matched by order alone it would be the wrong one.
  const auto with = [](int64_t rows, bool more) {
    Trace trace(60, 0);
    for (size_t i = 0; i < trace.size(); ++i) {
      trace[i] = (i % 2 == 0 ? 1 : -1) * 100 * rows;
    }
    trace.insert(trace.begin() + 20, {7000 * rows, -7000 * rows});
    if (more) {
      trace.insert(trace.begin() + 10, {500000, -500000});
    }
    return TracedRows{rows, trace};
  };
  const auto model = PeakModel::fit({with(2, false), with(3, true), with(16, true)});
  REQUIRE(model);
  CHECK(model->peak_bytes(2) == 14000);
  CHECK(model->peak_bytes(1600) == 7000 * 1600);
}

TEST_CASE("A model needs two traces of different sizes", "[sizer][bad input]") {
  CHECK_THROWS_AS(fit(affine, {}), c10::ValueError);
  CHECK_THROWS_AS(fit(affine, {2}), c10::ValueError);
  CHECK_THROWS_AS(fit(affine, {2, 2}), c10::ValueError);
  CHECK_THROWS_AS(fit(affine, {0, 2}), c10::ValueError);
}

TEST_CASE("A loop over rows and heads is one round of it", "[sizer]") {
  // As attention's backward in bfloat16 on the CPU: buffers of a head, of each row.
  const auto looped = [](int64_t rows) {
    Trace trace{100 * rows, 4608, 20 * rows};
    for (int64_t row = 0; row < rows; ++row) {
      for (int head = 0; head < 4; ++head) {
        trace.insert(trace.end(), {7552, -7552, 4, 5888, -5888, -4});
      }
      trace.insert(trace.end(), {900, -900});
    }
    trace.insert(trace.end(), {-4608, 300 * rows, -300 * rows, -20 * rows, -100 * rows});
    return trace;
  };
  std::vector<TracedRows> traces;
  for (const int64_t rows : {2, 3, 16}) {
    auto collapsed = looped(rows);
    brimful::collapse_rounds(collapsed);
    CHECK(collapsed.size() == 3 + 6 + 2 + 5);
    CHECK(peak_bytes(collapsed) == peak_bytes(looped(rows)));
    traces.push_back({rows, looped(rows)});
  }
  const auto model = PeakModel::fit(traces);
  REQUIRE(model);
  for (const int64_t rows : {1, 2, 10, 16, 40, 1000}) {
    CHECK(model->peak_bytes(rows) == peak_bytes(looped(rows)));
  }
}

TEST_CASE("What is taken to stay, or in other sizes, is no round", "[sizer]") {
  for (const Trace& trace : {Trace{8, 8, 8, 8}, Trace{8, -8, 16, -16, 8, -8}, Trace{8, 8, -8, 8, 8},
                             Trace{}, Trace{8, -8}, Trace{-8, -8, 8}}) {
    auto collapsed = trace;
    brimful::collapse_rounds(collapsed);
    CHECK(collapsed == trace);
  }
}

}  // namespace test_peak_model
