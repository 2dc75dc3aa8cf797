#include "sizer/length_law.h"
#include "support/catch.h"

#include <cmath>
#include <vector>

namespace test_length_law {

using brimful::PeakModel;
using brimful::TracedLength;
using brimful::traces_at;
using brimful::memory::peak_bytes;
using brimful::memory::Trace;

namespace {
using Work = Trace (*)(int64_t rows, int64_t length);

/// Attention: gradients, what grows with the tokens, and scores that grow with the square of the length.
Trace attention(int64_t rows, int64_t length) {
  const int64_t tokens = 64 * rows * length;
  const int64_t scores = 8 * rows * length * length;
  return {tokens, scores, scores, -scores, 5000, tokens, -tokens, -scores, -tokens, 3 * length};
}

/// The same with a buffer that is four times as large from 192 on, as a library's blocks are.
Trace stepped(int64_t rows, int64_t length) {
  auto trace = attention(rows, length);
  const int64_t buffer = (length < 192 ? 1000 : 4000);
  trace.insert(trace.begin() + 3, {buffer, -buffer});
  return trace;
}

/// A buffer that is most of what is taken.
Trace mostly_stepped(int64_t rows, int64_t length) {
  const int64_t buffer = (length < 192 ? 100 : 400) * 1000000;
  return {rows * length, buffer, -buffer, -rows * length};
}

Trace paged(int64_t rows, int64_t length) {
  const int64_t bytes = (6000 * rows * length + 4095) / 4096 * 4096;
  return {100 * rows * length, bytes, -bytes, -100 * rows * length};
}

/// Takes another way from 100 on.
Trace other_way(int64_t rows, int64_t length) {
  return length < 100 ? Trace{rows * length, -rows * length}
                      : Trace{7 * rows * length, 8, -8, -7 * rows * length};
}

std::vector<TracedLength> known(Work work, const std::vector<int64_t>& lengths,
                                const std::vector<int64_t>& rows = {2, 3, 16}) {
  std::vector<TracedLength> all;
  for (const auto length : lengths) {
    all.push_back({static_cast<double>(length), {}});
    for (const auto count : rows) {
      all.back().traces.push_back({count, work(count, length)});
    }
  }
  return all;
}

/// The predicted peak over the real one, less one; nothing if the length must be traced.
std::optional<double> error_at(const std::vector<TracedLength>& all, Work work, int64_t length,
                               int64_t rows = 200) {
  auto traces = traces_at(all, static_cast<double>(length));
  if (!traces) {
    return std::nullopt;
  }
  const auto model = PeakModel::fit(std::move(*traces));
  REQUIRE(model);
  return static_cast<double>(model->peak_bytes(rows)) /
             static_cast<double>(peak_bytes(work(rows, length))) -
         1;
}
}  // namespace

TEST_CASE("Four lengths show those between and up to a factor of two beyond them", "[sizer]") {
  for (const auto& lengths : std::vector<std::vector<int64_t>>{
           {16, 60, 300, 512}, {250, 255, 256, 258}, {30, 31, 200, 256, 400}}) {
    const auto all = known(attention, lengths);
    for (int64_t length = (lengths.front() + 1) / 2; length <= 2 * lengths.back(); ++length) {
      const auto error = error_at(all, attention, length);
      REQUIRE(error);
      REQUIRE(std::abs(*error) < 1e-4);
    }
    CHECK_FALSE(traces_at(all, static_cast<double>(2 * lengths.back() + 1)));
    CHECK_FALSE(traces_at(all, static_cast<double>((lengths.front() - 1) / 2)));
  }
}

TEST_CASE("Three lengths show nothing: no fourth one checks them", "[sizer]") {
  CHECK_FALSE(traces_at(known(attention, {16, 60, 300}), 100));
  CHECK_FALSE(traces_at({}, 100));
}

TEST_CASE("An allocation that grows in steps is forecast too large rather than too small",
          "[sizer]") {
  for (const auto work : {stepped, paged}) {
    const auto all = known(work, {16, 100, 150, 230, 300, 512});
    for (int64_t length = 16; length <= 512; length += 3) {
      const auto traces = traces_at(all, static_cast<double>(length));
      REQUIRE(traces);
      for (const auto& told : *traces) {
        const auto real = work(told.rows, length);
        for (size_t i = 0; i < real.size(); ++i) {
          REQUIRE(std::abs(told.trace[i]) >= std::abs(real[i]));
        }
      }
      for (const int64_t rows : {3, 16, 200}) {
        const auto error = error_at(all, work, length, rows);
        REQUIRE(error);
        REQUIRE(*error >= -0.001);
        REQUIRE((*error <= 0.02 || rows == 3 || length < 50));
      }
    }
  }
}

TEST_CASE("Where more than a hundredth of the peak is uncertain the length must be traced",
          "[sizer]") {
  const auto all = known(mostly_stepped, {100, 150, 170, 300, 400, 450});
  CHECK_FALSE(traces_at(all, 200));  // 100 or 400 MB
  CHECK_FALSE(traces_at(all, 800));  // not known
  CHECK(error_at(all, mostly_stepped, 120));
  CHECK(error_at(all, mostly_stepped, 420));
}

TEST_CASE("Another sequence of allocations is another law", "[sizer]") {
  const auto all = known(other_way, {10, 20, 40, 80, 120, 200, 300, 400});
  for (const int64_t length : {8, 33, 80, 120, 333, 800}) {
    const auto error = error_at(all, other_way, length);
    REQUIRE(error);
    CHECK(std::abs(*error) < 1e-4);
  }
  CHECK_FALSE(traces_at(all, 90));
  const auto few = known(other_way, {10, 20, 40, 80, 120, 200, 300});
  CHECK(traces_at(few, 60));
  CHECK_FALSE(traces_at(few, 250));  // only three lengths took that way
}

TEST_CASE("Rows that were not traced at every length count where four lengths have them",
          "[sizer]") {
  auto all = known(attention, {16, 60, 100, 200, 300, 512});
  all.back().traces.pop_back();
  all[4].traces.pop_back();
  const auto inside = traces_at(all, 150);
  REQUIRE(inside);
  CHECK(inside->size() == 3);
  const auto beyond = traces_at(all, 500);  // more than a factor of two beyond the last 16 rows
  REQUIRE(beyond);
  CHECK(beyond->size() == 2);
}

}  // namespace test_length_law
