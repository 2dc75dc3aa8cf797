// Collectives whose sizes follow the rows: a rank that issues one without a piece asks a rank that runs it.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include "sharded/count_once.h"
#include "sharded/size_exchange.h"
#include "support/catch.h"
#include "support/watchdog.h"

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace test_sized_calls {

using brimful::CallSizes;
using brimful::ControlRecord;
using brimful::count_once;
using brimful::SizeExchange;
using brimful::test::Watchdog;

namespace {
struct Call {
  c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::relu", "");
  std::vector<c10::IValue> of(at::IntArrayRef sizes) const { return {at::empty(sizes)}; }
};
}  // namespace

TEST_CASE("A rank says which sizes its calls have, once they have begun", "[sharded]") {
  const Watchdog watchdog("sizes that are asked for");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  SizeExchange first(store, "sizes/", 0);
  SizeExchange second(store, "sizes/", 1);
  const Call call;
  const auto nothing = [] {};
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };

  for (int64_t attempt = 3; attempt < 6; ++attempt) {
    std::thread piece([&] {
      pause();  // the other one asks before this one's attempt
      first.own().begin(attempt);
      first.own().add(1, call.op, call.of({2, attempt}));
      pause();
      first.own().add(4, call.op, call.of({}));
      pause();
      first.own().close(5);
    });
    second.own().begin(attempt);
    CHECK(second.ask(0, attempt, 1, nothing) == CallSizes{2, 2, attempt});
    CHECK(second.ask(0, attempt, 4, nothing) == CallSizes{0});
    CHECK(second.ask(0, attempt, 5, nothing) == std::nullopt);
    CHECK(second.ask(0, attempt, 1, nothing) == CallSizes{2, 2, attempt});
    piece.join();
  }
  first.own().begin(6);
  CHECK_THROWS_AS(second.ask(0, 6, 0, [] { throw std::runtime_error("given up"); }),
                  std::runtime_error);
}

TEST_CASE("Rows that two ranks have count once", "[sharded]") {
  std::vector<ControlRecord> records(4);
  for (size_t rank = 0; rank < 4; ++rank) {
    records[rank].weight = rank < 2 ? 3 : 5;
    records[rank].loss_sum = 1;
    records[rank].next_weight = 7;
  }
  CHECK(count_once(records, {0, 0, 2, 2}).empty());
  CHECK(total_weight(records) == 8);
  CHECK(next_total_weight(records) == 14);
  CHECK(mean_loss(records) == 0.25);

  std::vector<ControlRecord> others(2);
  others[0].weight = 3;
  others[1].weight = 4;
  CHECK(count_once(others, {0, 0}).find("(ranks: 0, 1, weights: 3, 4)") != std::string::npos);
  others[1].weight = brimful::kLateWeight;
  CHECK(count_once(others, {0, 0}).empty());
  CHECK(count_once(others, {}).empty());
}

}  // namespace test_sized_calls
