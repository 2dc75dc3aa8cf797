// Processes that find each other through a store (here: threads), come and go.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/error.h>
#include <brimful/launch/members.h>
#include <brimful/step/stop.h>

#include <functional>
#include <thread>

#include "launch/member_list.h"

namespace test_members {

using namespace brimful;
using namespace brimful::test;
using std::chrono::milliseconds;

namespace {
/// A connection to it takes a while, as where the host's name is looked up.
struct SlowToConnect : c10d::PrefixStore {
  using PrefixStore::PrefixStore;
  c10::intrusive_ptr<c10d::Store> clone() override {
    std::this_thread::sleep_for(milliseconds(800));
    return PrefixStore::clone();
  }
};

struct Store {
  c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();
  int world_size = 2;

  std::unique_ptr<Members> make(const std::string& name) const { return make(name, store); }
  std::unique_ptr<Members> make(const std::string& name,
                                const c10::intrusive_ptr<c10d::Store>& seen,
                                milliseconds connect = milliseconds(10000)) const {
    MembersOptions options;
    options.world_size = world_size;
    options.heartbeat = milliseconds(20);
    options.dead_after = milliseconds(200);
    options.patience = options.timeout = milliseconds(10000);
    options.connect = connect;
    return std::make_unique<Members>(seen, name, options);
  }
};

void at_once(const std::vector<std::function<void()>>& all) {
  std::vector<std::thread> threads;
  for (const auto& each : all) {
    threads.emplace_back(each);
  }
  for (auto& thread : threads) {
    thread.join();
  }
}
}  // namespace

TEST_CASE("A list of members survives its text", "[launch][members]") {
  const launch::MemberList list{"a model", {{7, "rank 0 of here"}, {12, ""}, {3, "x"}}};
  const auto back = launch::decode_members(launch::encode_members(list));
  CHECK(back.model == list.model);
  REQUIRE(back.members.size() == 3);
  CHECK(back.members[0].name == "rank 0 of here");
  CHECK(back.members[1].name.empty());
  CHECK(launch::ids_of(back.members) == std::vector<int64_t>{7, 12, 3});
  CHECK(launch::rank_of(back, 3) == 2);
  CHECK(launch::rank_of(back, 4) == -1);
  CHECK(launch::one_line("a\nb\tc") == "a b c");
}

TEST_CASE("A process that is slow to connect to the store holds up no group", "[launch][members]") {
  const Watchdog watchdog("a slow connection", std::chrono::seconds(60));
  Checks checks;
  const Store store;
  const milliseconds soon(400);  // less than a connection takes
  auto fast = store.make("fast", c10::make_intrusive<c10d::PrefixStore>("", store.store), soon);
  auto slow = store.make("slow", c10::make_intrusive<SlowToConnect>("", store.store), soon);
  const auto enter = [&](Members& members) {
    for (int64_t epoch = 1; epoch <= 2; ++epoch) {
      checks.expect(members.enter("model").epoch == epoch, "the group is formed at once");
    }
  };
  at_once({[&] { enter(*fast); }, [&] { enter(*slow); }});
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Members form a group, then one without who has left, then one with who joins",
          "[launch][members]") {
  const Watchdog watchdog("groups of members", std::chrono::seconds(60));
  Checks checks;
  const Store store;
  clear_regroup();
  auto first = store.make("first");
  at_once({[&] {
             const auto entered = first->enter("model");
             checks.expect(entered.epoch == 1 && entered.world_size == 2, "the first group");
             const auto alone = first->enter("model");
             checks.expect(alone.epoch == 2 && alone.world_size == 1 && alone.rank == 0, "alone");
           },
           [&] { store.make("second")->enter("model"); }});  // and leaves
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK_FALSE(regroup_requested());
  at_once({[&] {
             while (!regroup_requested()) {
               std::this_thread::sleep_for(milliseconds(1));
             }
             const auto entered = first->enter("model");
             checks.expect(entered.epoch == 3 && entered.rank == 0, "the member is first");
             checks.expect(entered.names == std::vector<std::string>{"first", "third"}, "names");
           },
           [&] {
             const auto third = store.make("third");
             const auto entered = third->enter("model");
             checks.expect(entered.epoch == 3 && entered.rank == 1, "who joins is last");
           }});
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK_FALSE(regroup_requested());
}

TEST_CASE("Another model is refused before it is in", "[launch][members]") {
  const Watchdog watchdog("another model", std::chrono::seconds(60));
  Store store;
  store.world_size = 1;
  const auto one = store.make("one");
  CHECK(one->enter("a model").world_size == 1);
  const auto other = store.make("other");
  const auto caught = catching([&] { other->enter("another model"); });
  CHECK(caught.type == Caught::Type::value_error);
  CHECK(caught.text.find("here: another model; there: a model") != std::string::npos);
  CHECK_FALSE(regroup_requested());
}

}  // namespace test_members
