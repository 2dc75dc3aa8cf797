#include <brimful/sizer/batch_sizer.h>
#include "sizer/forecasts.h"
#include "sizer/found_pieces.h"
#include "support/sizer_test.h"

#include <torch/data/example.h>

namespace test_forecasts {

using namespace brimful;
using namespace brimful::test;

namespace {

Rehearsal rehearsal_of(int64_t length, int64_t factor = 1) {
  Rehearsal rehearsal;
  for (const int64_t rows : {2, 3, 16}) {
    const int64_t bytes = 1000 * factor * rows * length;
    rehearsal.first.push_back({rows, {bytes, 500, -500, -bytes}});
    rehearsal.second.push_back({rows, {bytes, 500, -500, -bytes, bytes, -bytes}});
  }
  return rehearsal;
}

RowKind kind_with(std::vector<int64_t> sizes, std::string form = "Float;") {
  return {std::move(form), std::move(sizes)};
}

/// A model without a process group: x.matmul(w) squared, for sequences of any length.
struct Plain {
  at::Tensor w = at::full({8, 8}, 0.1).requires_grad_();
  int calls = 0;

  BatchSizer sizer(BatchSizerOptions options) {
    return {StepGroup({}, {w}), Transaction({}, {c10::Device(c10::DeviceType::CPU)}),
            std::move(options)};
  }
  auto loss() {
    return [this](const at::Tensor& x) {
      ++calls;
      return x.matmul(w).tanh().square().mean();
    };
  }
};

/// Room for `bytes` more, while it lives.
struct Room {
  explicit Room(int64_t bytes) {
    const auto cpu = c10::Device(c10::DeviceType::CPU);
    memory::set_limit(cpu, memory::stats(cpu).used_bytes + bytes);
  }
  ~Room() { memory::set_limit(c10::Device(c10::DeviceType::CPU), std::nullopt); }
};

struct Sequences {
  at::Tensor words;
};
int64_t rows_of(const Sequences& batch) {
  return batch.words.size(0);
}
Sequences slice_rows(const Sequences& batch, int64_t begin, int64_t end) {
  return {batch.words.slice(0, begin, end)};
}
void add_kind(const Sequences& batch, RowKind& kind) {
  kind.add(batch.words, 0);
}
}  // namespace

TEST_CASE("Kinds on a line through the sizes of four follow from them", "[sizer]") {
  Forecasts forecasts;
  for (const int64_t length : {20, 50, 90, 120}) {
    const auto kind = kind_with({length, 7, length - 1});
    CHECK_FALSE(forecasts.find(kind));
    CHECK(forecasts.keep(kind, rehearsal_of(length)));
  }
  const auto told = forecasts.find(kind_with({70, 7, 69}));
  REQUIRE(told);
  REQUIRE(*told);
  CHECK((*told)->first.peak_bytes(100) == 100 * 70 * 1000 + 500);
  CHECK_FALSE(forecasts.find(kind_with({70, 7, 70})));
  CHECK_FALSE(forecasts.find(kind_with({70, 8, 69})));
  CHECK_FALSE(forecasts.find(kind_with({70, 7, 69}, "Double;")));
  CHECK_FALSE(forecasts.find(kind_with({70, 7})));
}

TEST_CASE("Two lengths that vary by themselves are no line", "[sizer]") {
  Forecasts forecasts;
  for (const int64_t length : {20, 50, 90, 120, 200}) {
    forecasts.keep(kind_with({length, length * length % 37}), rehearsal_of(length));
  }
  CHECK_FALSE(forecasts.find(kind_with({70, 20})));
}

TEST_CASE("A forecast that was too small is not given again", "[sizer]") {
  Forecasts forecasts;
  for (const int64_t length : {20, 50, 90, 120}) {
    forecasts.keep(kind_with({length}), rehearsal_of(length));
  }
  const auto kind = kind_with({70});
  REQUIRE(forecasts.find(kind));
  forecasts.distrust(kind);
  CHECK_FALSE(forecasts.find(kind));
  forecasts.keep(kind, rehearsal_of(70, 2));
  const auto known = forecasts.find(kind);
  REQUIRE(known);
  CHECK((*known)->first.peak_bytes(100) == 2 * 100 * 70 * 1000 + 500);
}

TEST_CASE("Kinds that were not needed for long are forgotten, those that laws rest on are not",
          "[sizer]") {
  Forecasts forecasts;
  for (const int64_t length : {20, 50, 90, 120}) {
    forecasts.keep(kind_with({length}), rehearsal_of(length));
  }
  for (int64_t i = 0; i < 200; ++i) {
    REQUIRE(forecasts.find(kind_with({20 + i % 100})));
    forecasts.keep(kind_with({i}, "Image;" + std::to_string(i)), rehearsal_of(i + 1));
    REQUIRE(forecasts.rehearsed() <= 64);
  }
  CHECK(forecasts.find(kind_with({199}, "Image;199")));
  CHECK_FALSE(forecasts.find(kind_with({0}, "Image;0")));
}

TEST_CASE("The kind of a batch is all that a row's memory depends on", "[sizer]") {
  const auto words = at::zeros({6, 11}, at::kLong);
  CHECK(kind_of(words) == RowKind{"Long2;", {11}});
  CHECK(kind_of(std::pair(words, at::zeros({6, 2, 3}))) == RowKind{"Long2;Float3;", {11, 2, 3}});
  CHECK(kind_of(Along{at::zeros({5, 6, 4}), 1}) == RowKind{"Float3;", {5, 4}});
  CHECK(kind_of(std::tuple(words, Shared{at::zeros({9})}, 3)) == RowKind{"Long2;Float1;", {11, 9}});
  CHECK(kind_of(std::map<std::string, at::Tensor>{{"a", words}}).sizes == Split{11});
  CHECK(kind_of(std::optional(words)).sizes == Split{11});
  CHECK(kind_of(std::vector{words, words}).sizes == Split{11, 11});
  CHECK(kind_of(c10::IValue(words)).sizes == Split{11});
  CHECK(kind_of(std::vector<torch::data::Example<>>{{at::zeros({7}), at::zeros({})}}).sizes ==
        Split{7});
  CHECK(kind_of(at::zeros({6, 5}).to_sparse()) == RowKind{"Float*;", {}, true});
}

TEST_CASE("Kinds have fingerprints that are the same in every process", "[sizer]") {
  const RowKind kind{"Long2;", {11}};
  CHECK(fingerprint(kind) == fingerprint(RowKind{"Long2;", {11}}));
  CHECK(fingerprint(RowKind{"a", {}}) == 0xE40C292C);  // FNV-1a's own example
  CHECK(fingerprint(kind) != fingerprint(RowKind{"Long2;", {12}}));
  CHECK(fingerprint(kind) != fingerprint(RowKind{"Int2;", {11}}));
  CHECK(fingerprint(RowKind{"", {1, 2}}) != fingerprint(RowKind{"", {2, 1}}));
}

TEST_CASE("Pieces that were found hold for their batch, in the room for which they are right",
          "[sizer]") {
  const FoundPieces found{7, 100, 4, 5000, 8000};
  CHECK(found.holds(7, 100, 5000));
  CHECK(found.holds(7, 100, 7999));
  CHECK_FALSE(found.holds(7, 100, 8000));
  CHECK_FALSE(found.holds(7, 100, 4999));
  CHECK_FALSE(found.holds(7, 99, 6000));
  CHECK_FALSE(found.holds(8, 100, 6000));
  CHECK(FoundPieces{7, 100, 1, 5000, 0}.holds(7, 100, int64_t{1} << 60));
  CHECK_FALSE(FoundPieces{}.holds(0, 0, 100));

  std::map<std::string, double> state;
  found.put(state);
  const auto again = FoundPieces::of(state);
  CHECK(again.holds(7, 100, 5000));
  CHECK_FALSE(again.holds(7, 100, 8000));
  CHECK(again.pieces == 4);
  CHECK(FoundPieces::of({{"steps", 3}}).rows == 0);
  state["found_pieces"] = 101;
  CHECK_THROWS_WITH(FoundPieces::of(state),
                    Catch::Contains("(found_rows: 100, found_pieces: 101)"));
  state["found_pieces"] = -1;
  CHECK_THROWS_AS(FoundPieces::of(state), c10::ValueError);
}

TEST_CASE("Sequences of any length are split as they fit, from the rehearsals of a few",
          "[sizer]") {
  const Quiet quiet;
  Plain plain;
  BatchSizerOptions options;
  options.predict = true;
  auto sizer = plain.sizer(options);
  const auto cpu = c10::Device(c10::DeviceType::CPU);
  const auto before = memory::stats(cpu).ooms;
  int rehearsed = 0;
  for (int64_t i = 0; i < 60; ++i) {
    const auto batch = at::ones({64, 20 + 37 * i % 101, 8});
    const Room room(200'000);
    plain.calls = 0;
    const auto outcome = i % 2 == 0 ? sizer.step(batch, plain.loss())
                                    : sizer.step(std::pair(batch, 1), [&](const auto& piece) {
                                        return plain.loss()(piece.first);
                                      });
    CHECK(outcome.retries == 0);
    rehearsed += plain.calls > outcome.pieces ? 1 : 0;
    plain.w.mutable_grad().reset();
  }
  CHECK(memory::stats(cpu).ooms == before);
  CHECK(rehearsed >= 4);
  CHECK(rehearsed <= 8);
}

TEST_CASE("A type of the user's says what its kind is", "[sizer]") {
  const Quiet quiet;
  Plain plain;
  BatchSizerOptions options;
  options.predict = true;
  auto sizer = plain.sizer(options);
  const Room room(10'000'000);
  for (const int64_t length : {10, 10, 20}) {
    plain.calls = 0;
    sizer.step(Sequences{at::ones({20, length, 8})},
               [&](const Sequences& piece) { return plain.loss()(piece.words); });
    plain.w.mutable_grad().reset();
    CHECK(plain.calls == (length == 10 && sizer.steps() == 2 ? 1 : 9));
  }
}

TEST_CASE("A plan says what its peak consists of", "[sizer]") {
  const Quiet quiet;
  Plain plain;
  BatchSizerOptions options;
  const bool optimizer = GENERATE(false, true);
  options.standing_bytes = [&] {
    auto standing = brimful::standing_bytes({plain.w}, {at::zeros({3})}, c10::DeviceType::CPU);
    standing.optimizer_state = 512;
    return standing;
  };
  options.optimizer_bytes = [&] { return optimizer ? 50'000'000 : 0; };
  auto sizer = plain.sizer(options);
  const auto plan = sizer.plan(at::ones({64, 30, 8}), plain.loss());
  REQUIRE(plan);
  CHECK(plan->parameter_bytes == 256);
  CHECK(plan->gradient_bytes == 256);
  CHECK(plan->buffer_bytes == 12);
  CHECK(plan->optimizer_bytes == 512);
  CHECK(plan->activation_bytes == plan->peak_bytes - 256 - 256 - 12 - 512);
  CHECK((plan->peak_bytes == plan->used_bytes + 50'000'000) == optimizer);
}

}  // namespace test_forecasts
