#include <ATen/ATen.h>
#include "support/catch.h"

#include <brimful/step/transaction.h>

namespace test_transaction {

using brimful::Transaction;

namespace {
const c10::Device kCpu(c10::DeviceType::CPU);
}

TEST_CASE("A restored transaction gives back random numbers and buffers", "[step]") {
  const auto floats = at::arange(4, at::kFloat);
  const auto count = at::full({}, 3, at::kLong);
  Transaction transaction({floats, count}, {kCpu});
  transaction.capture();
  const auto drawn = at::rand({5});
  floats.add_(1);
  count.add_(1);
  const auto* data = floats.const_data_ptr();
  transaction.restore();
  CHECK(at::equal(at::rand({5}), drawn));
  CHECK(at::equal(floats, at::arange(4, at::kFloat)));
  CHECK(count.item<int64_t>() == 3);
  CHECK(floats.const_data_ptr() == data);

  floats.zero_();
  transaction.restore();  // a second time after one capture
  CHECK(at::equal(floats, at::arange(4, at::kFloat)));
  CHECK(at::equal(at::rand({5}), drawn));
}

TEST_CASE("A later capture replaces an earlier one", "[step]") {
  const auto buffer = at::zeros({2});
  Transaction transaction({buffer}, {});
  transaction.capture();
  buffer.fill_(1);
  transaction.capture();
  buffer.fill_(2);
  transaction.restore();
  CHECK(at::equal(buffer, at::ones({2})));
}

TEST_CASE(
    "A buffer changed behind its version counter is restored, an untouched one is not written",
    "[step]") {
  const auto changed = at::zeros({2});
  const auto untouched = at::zeros({2});
  Transaction transaction({changed, untouched}, {});
  transaction.capture();
  changed.variable_data().fill_(5);
  const auto version = untouched._version();
  transaction.restore();
  CHECK(at::equal(changed, at::zeros({2})));
  CHECK(untouched._version() == version);
}

TEST_CASE("Keepers are captured and restored with the rest", "[step]") {
  Transaction transaction({}, {});
  int state = 1;
  int kept = 0;
  transaction.add({[&] { kept = state; }, [&] { state = kept; }});
  transaction.capture();
  state = 2;
  transaction.restore();
  CHECK(state == 1);
}

TEST_CASE("Buffers that are replaced are followed, and get their values back", "[step]") {
  auto count = at::zeros({});
  Transaction transaction({}, {});
  transaction.follow([&] { return std::vector<at::Tensor>{count}; });
  for (int step = 0; step < 3; ++step) {
    transaction.capture();
    for (int attempt = 0; attempt < 2; ++attempt) {
      count = count + 1;
      count.add_(1);
      transaction.restore();
      CHECK(count.item<int64_t>() == 2 * step);
    }
    count = count + 1;
    count.add_(1);
  }
  CHECK(count.item<int64_t>() == 6);
}

}  // namespace test_transaction
