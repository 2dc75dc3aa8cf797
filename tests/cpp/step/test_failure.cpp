#include <brimful/step/failure.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <condition_variable>
#include <stdexcept>

#include "step/failure_board.h"
#include "step/failures.h"
#include "support/catch.h"

namespace test_failure {
namespace {
using brimful::decode_failure;
using brimful::Failure;
using brimful::failure_of;
using brimful::FailureBoard;
using brimful::Status;
using std::chrono::milliseconds;

Failure example() {
  return {3, 1, int64_t{5} << 40, Status::out_of_memory,
          "no room\nfor 3 \xC2\xB5"
          "B"};
}

void check_equal(const std::optional<Failure>& failure, const Failure& expected) {
  REQUIRE(failure.has_value());
  CHECK(failure->rank == expected.rank);
  CHECK(failure->replica == expected.replica);
  CHECK(failure->step == expected.step);
  CHECK(failure->kind == expected.kind);
  CHECK(failure->text == expected.text);
}

/// A store whose server is stopped while `stopped`.
class StoppedStore final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    await_server();
    return HashStore::check(keys);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    await_server();
    return HashStore::compareSet(key, expected, desired);
  }
  void go_on() {
    const std::lock_guard lock(mutex_);
    stopped_ = false;
    changed_.notify_all();
  }

 private:
  void await_server() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !stopped_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = true;
};
}  // namespace

TEST_CASE("A failure arrives as it was sent", "[step][failure]") {
  check_equal(decode_failure(encode(example())), example());
  check_equal(decode_failure(encode(Failure{})), Failure{});
}

TEST_CASE("Of several failures all ranks raise the first shortage, else the first",
          "[step][failure]") {
  const Failure error{0, 0, 3, Status::error, "broken"};
  const Failure shortage{2, 0, 3, Status::out_of_memory, "no room"};
  const Failure later{3, 0, 3, Status::out_of_memory, "none here"};
  const std::vector<Failure> errors{error, {1, 0, 3, Status::error, "too"}};
  CHECK(brimful::severest(errors).rank == 0);
  CHECK(to_string(errors) == "rank 0: broken; rank 1: too");
  try {
    brimful::throw_step_failed(3, {error, shortage, later});
    FAIL("nothing was thrown");
  } catch (const brimful::RankOutOfMemory& raised) {
    CHECK(raised.rank() == 2);
    CHECK(raised.step() == 3);
    CHECK(std::string(raised.what_without_backtrace()) ==
          "step 3 failed on rank 0: broken; rank 2: out of memory: no room; rank 3: out of memory: "
          "none here");
  }
}

TEST_CASE("A failure that did not arrive has the kind of its rank's record", "[step][failure]") {
  const FailureBoard nowhere(nullptr, "");
  const auto failure = brimful::posted_failure(nowhere, "place", 4, Status::out_of_memory);
  CHECK(failure.rank == 4);
  CHECK(failure.kind == Status::out_of_memory);
  CHECK(brimful::posted_failure(nowhere, "place", 4, Status::retry).kind == Status::error);
}

TEST_CASE("A failure's text is cut where there is no room for all of it", "[step][failure]") {
  auto expected = example();
  const auto whole = encode(expected);
  expected.text.resize(2);
  check_equal(decode_failure(encode(example(), whole.size() - example().text.size() + 2)),
              expected);
  CHECK_THROWS_AS(encode(example(), 4), c10::ValueError);
}

TEST_CASE("What is no failure is not read as one", "[step][failure]") {
  const auto whole = encode(example());
  for (size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    CHECK_FALSE(decode_failure({whole.begin(), whole.begin() + static_cast<int64_t>(size)}));
  }
  auto longer = whole;
  longer.push_back(0);
  CHECK_FALSE(decode_failure(longer));
  for (const size_t place : {0, 1, 21}) {  // mark, kind, the text's size
    CAPTURE(place);
    auto garbled = whole;
    garbled[place] ^= 0x80;
    CHECK_FALSE(decode_failure(garbled));
  }
}

TEST_CASE("A failure says of what kind an error is", "[step][failure]") {
  const auto memory = failure_of(std::make_exception_ptr(std::bad_alloc()));
  CHECK(memory.kind == Status::out_of_memory);
  CHECK(to_string(memory) == "out of memory: std::bad_alloc");
  const auto other = failure_of(std::make_exception_ptr(std::runtime_error("no file")));
  CHECK(other.kind == Status::error);
  CHECK(to_string(other) == "no file");
}

TEST_CASE("Ranks read on the board what others have left there first", "[step][failure]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  FailureBoard here(store, "brimful/1/");
  const FailureBoard there(store, "brimful/1/");
  const Failure first{1, 0, 7, Status::error, "the first word"};
  CHECK_FALSE(there.find_other(7, 0, 2));
  here.post(first);
  here.post({1, 0, 7, Status::out_of_memory, "a later word"});
  check_equal(there.find_other(7, 0, 2), first);
  CHECK_FALSE(there.find_other(7, 1, 2));
  CHECK_FALSE(there.find_other(8, 0, 2));
  check_equal(there.await(FailureBoard::place_of(7, 1), milliseconds(0)), first);
  CHECK(there.await(FailureBoard::place_of(8, 1), milliseconds(1)).text ==
        "(its message did not arrive; see that rank's own output)");
  store->set("brimful/1/garbled", std::vector<uint8_t>{1, 2, 3});
  CHECK(there.find("garbled")->text == "(its message cannot be read; see that rank's own output)");
}

TEST_CASE("All learn of a rank that has given up", "[step][failure]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  FailureBoard here(store, "brimful/1/");
  FailureBoard another(store, "brimful/2/");
  CHECK_FALSE(here.given_up(milliseconds(10000)));
  FailureBoard(store, "brimful/1/").give_up({});
  CHECK_FALSE(here.given_up(milliseconds(10000), milliseconds(60000)));  // it has just asked
  CHECK(here.given_up(milliseconds(10000)));
  CHECK_FALSE(another.given_up(milliseconds(10000)));
}

TEST_CASE("A store that does not answer keeps no rank waiting", "[step][failure]") {
  const auto store = c10::make_intrusive<StoppedStore>();
  FailureBoard board(store, "");
  CHECK_FALSE(board.given_up(milliseconds(1)));
  CHECK_THROWS_AS(board.find("place", milliseconds(1)), std::runtime_error);
  CHECK_THROWS_AS(board.post("place", Failure{}, milliseconds(1)), std::runtime_error);
  board.give_up({}, milliseconds(1));
  store->go_on();
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(10000);
  bool given_up = false;  // the question from before may be answered first
  while (!given_up && std::chrono::steady_clock::now() < deadline) {
    given_up = board.given_up(milliseconds(10000));
  }
  CHECK(given_up);
}

TEST_CASE("A failure's text goes to other ranks as UTF-8, cut at a character", "[step]") {
  struct Row {
    std::string text;
    std::string read;
  };
  for (const auto& [text, read] : std::vector<Row>{
           {"caf\xe9.jpg", "caf\\xe9.jpg"},
           {std::string("before\0behind", 13), "before\\x00behind"},
           {"two\nlines", "two\nlines"},
       }) {
    Failure failure;
    failure.text = text;
    CHECK(decode_failure(brimful::encode(failure))->text == read);
  }
  Failure failure;
  failure.text = "\xe6\x96\x87\xe6\x96\x87";
  const auto most = brimful::encode(failure).size();
  for (size_t less = 1; less < 3; ++less) {
    CHECK(decode_failure(brimful::encode(failure, most - less))->text == "\xe6\x96\x87");
  }
}

TEST_CASE("Failures of many steps leave few keys in the store", "[step][failure]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const FailureBoard here(store, "brimful/1/");
  const FailureBoard there(store, "brimful/1/");
  const auto failed = [](int rank, int64_t step) {
    Failure failure;
    failure.rank = rank;
    failure.step = step;
    failure.text = "step " + std::to_string(step);
    return failure;
  };
  for (int64_t step = 0; step < 100; ++step) {
    for (int times = 0; times < 3; ++times) {  // the first one stays
      here.post(failed(0, step));
    }
    there.post(failed(1, step));
    check_equal(there.find_other(step, 1, 2), failed(0, step));
    if (step > 2) {  // a rank that is behind
      check_equal(there.find_other(step - 2, 1, 2), failed(0, step - 2));
    }
  }
  CHECK(store->getNumKeys() <= 20);
}

}  // namespace test_failure
