#include "support/catch.h"

#include <brimful/step/control_record.h>

#include <cmath>
#include <cstring>
#include <set>

namespace test_control_record {

using namespace brimful;

namespace {
ControlRecord record_of(Status verdict, Next next = Next::unknown, double weight = 0,
                        double loss_sum = 0) {
  ControlRecord record;
  record.verdict = verdict;
  record.next = next;
  record.weight = weight;
  record.loss_sum = loss_sum;
  return record;
}

template <typename T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}
}  // namespace

TEST_CASE("A record survives its bytes bit by bit", "[step]") {
  const double value = GENERATE(0.0, -0.0, 1.0 / 3, -1e308, 5e-324, HUGE_VAL, std::nan(""));
  ControlRecord record;
  record.verdict = Status::out_of_memory;
  record.next = Next::no;
  record.stop = GENERATE(uint8_t{0}, uint8_t{1}, uint8_t{63});
  record.regroup = GENERATE(false, true);
  record.next_pieces = 0xABCD;
  record.weight = value;
  record.loss_sum = -value;
  record.next_weight = value + 1;
  record.ref = 0x89ABCDEF;
  record.work_ms = static_cast<float>(value);
  record.plan = 0x76543210;
  record.updated = {1, 0, 1, 1, 0, 0, 0, 1};
  const auto back = decode(encode(record));
  CHECK(back.verdict == record.verdict);
  CHECK(back.next == record.next);
  CHECK(back.stop == record.stop);
  CHECK(back.regroup == record.regroup);
  CHECK(back.next_pieces == record.next_pieces);
  CHECK(same_bits(back.weight, record.weight));
  CHECK(same_bits(back.loss_sum, record.loss_sum));
  CHECK(same_bits(back.next_weight, record.next_weight));
  CHECK(back.ref == record.ref);
  CHECK(same_bits(back.work_ms, record.work_ms));
  CHECK(back.plan == record.plan);
  CHECK(back.updated == record.updated);
  CHECK(encode(record)[kUpdatedOffset + 2] == 1);
  CHECK(updated_alike({record, back}));
  CHECK_FALSE(updated_alike({record, back, {}}));
}

TEST_CASE("The loss stands where a device may write it", "[step]") {
  const auto record = record_of(Status::ok, Next::yes, 0, 1.25);
  const auto bytes = encode(record);
  double loss = 0;
  std::memcpy(&loss, bytes.data() + kLossSumOffset, sizeof(loss));
  CHECK(loss == 1.25);
  CHECK(decode(RecordBytes{}).verdict == Status::silent);  // what a rank that wrote nothing sends
}

TEST_CASE("The severest verdict decides", "[step]") {
  CHECK(worst({}) == Status::silent);
  CHECK(worst({record_of(Status::ok), record_of(Status::no_data)}) == Status::no_data);
  CHECK(worst({record_of(Status::retry), record_of(Status::ok)}) == Status::retry);
  CHECK(worst({record_of(Status::retry), record_of(Status::error)}) == Status::error);
  CHECK(worst({record_of(Status::out_of_memory), record_of(Status::error)}) == Status::error);
  CHECK_FALSE(is_failure(Status::retry));
  CHECK(is_failure(Status::error));
  CHECK(is_failure(Status::out_of_memory));
}

TEST_CASE("The mean loss is weighted, and 0 where nothing weighs", "[step]") {
  const std::vector<ControlRecord> records{record_of(Status::ok, Next::no, 3, 6),
                                           record_of(Status::ok, Next::no, 1, 4)};
  CHECK(total_weight(records) == 4);
  CHECK(mean_loss(records) == 2.5);
  CHECK(mean_loss({record_of(Status::no_data)}) == 0);
}

TEST_CASE("The loop ends when every rank says that it has no more", "[step]") {
  CHECK(no_rank_continues({record_of(Status::ok, Next::no), record_of(Status::ok, Next::no)}));
  CHECK_FALSE(
      no_rank_continues({record_of(Status::ok, Next::no), record_of(Status::ok, Next::yes)}));
  CHECK_FALSE(
      no_rank_continues({record_of(Status::ok, Next::no), record_of(Status::ok, Next::unknown)}));
}

TEST_CASE("The next step's weight is known if every rank knows its own", "[step]") {
  auto first = record_of(Status::ok, Next::yes);
  auto second = record_of(Status::ok, Next::yes);
  first.next_weight = 3;
  CHECK(std::isnan(next_total_weight({first, second})));
  second.next = Next::no;  // its weight no longer matters
  CHECK(next_total_weight({first, second}) == 3);
}

TEST_CASE("Buffers come from the lowest rank that has a batch", "[step]") {
  const auto none = record_of(Status::ok, Next::no);
  const auto some = record_of(Status::ok, Next::yes);
  const auto perhaps = record_of(Status::ok);
  const auto hardly = record_of(Status::no_data);
  CHECK(next_buffer_source({none, some, some}) == 1);
  CHECK(next_buffer_source({some, none}) == 0);
  CHECK(next_buffer_source({none, none}) == 0);
  CHECK(next_buffer_source({perhaps, perhaps}) == 0);
  CHECK(next_buffer_source({none, hardly, perhaps, perhaps}) == 2);
  CHECK(next_buffer_source({none, hardly}) == 1);
  CHECK(next_buffer_source({perhaps, some}) == 1);
}

TEST_CASE("Numbers that a rank may divide by have fingerprints of their own", "[step]") {
  std::set<uint32_t> found;
  for (int i = 1; i <= 20000; ++i) {
    found.insert(fingerprint(i));
    found.insert(fingerprint(i + 1e-9));
    found.insert(fingerprint(1.0 / (i + 1)));
  }
  CHECK(found.size() >= 3 * 20000 - 2);
  auto first = record_of(Status::ok);
  auto second = record_of(Status::no_data);
  first.ref = second.ref = fingerprint(8);
  CHECK(ranks_with_another_ref({first, second}).empty());
  second.ref = fingerprint(std::nextafter(8, 9));
  CHECK(ranks_with_another_ref({first, second, first, second}) == std::vector<int>{1, 3});
}

}  // namespace test_control_record
