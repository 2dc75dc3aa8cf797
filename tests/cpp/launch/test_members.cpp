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
#include "launch/whole_replicas.h"

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

  /// A rank of two.
  std::unique_ptr<Members> make_rank(const std::string& replica, int rank) const {
    auto options = options_for(milliseconds(10000));
    options.replica = replica;
    options.pipeline_rank = rank;
    options.pipeline_size = 2;
    return std::make_unique<Members>(store, replica + std::to_string(rank), options);
  }
  std::unique_ptr<Members> make(const std::string& name) const { return make(name, store); }
  std::unique_ptr<Members> make(const std::string& name,
                                const c10::intrusive_ptr<c10d::Store>& seen,
                                milliseconds connect = milliseconds(10000)) const {
    return std::make_unique<Members>(seen, name, options_for(connect));
  }
  MembersOptions options_for(milliseconds connect) const {
    MembersOptions options;
    options.world_size = world_size;
    options.heartbeat = milliseconds(20);
    options.dead_after = milliseconds(200);
    options.patience = options.timeout = milliseconds(10000);
    options.connect = connect;
    return options;
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
  const launch::MemberList list{"a model",
                                {{7, "rank 0 of here", "a pipeline", 2}, {12, ""}, {3, "x"}}};
  const auto back = launch::decode_members(launch::encode_members(list));
  CHECK(back.model == list.model);
  REQUIRE(back.members.size() == 3);
  CHECK(back.members[0].name == "rank 0 of here");
  CHECK(back.members[0].replica == "a pipeline");
  CHECK(back.members[0].pipeline_rank == 2);
  CHECK(back.members[1].name.empty());
  CHECK(back.members[1].replica.empty());
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

TEST_CASE("A process that comes when all members have gone does not wait for them",
          "[launch][members]") {
  const Watchdog watchdog("a job that has ended", std::chrono::seconds(60));
  const Store store;
  clear_regroup();
  const auto join = [&] {
    const auto late = store.make("late");
    const auto caught = catching([&] { late->enter("model"); });
    CHECK_THAT(caught.text, Catch::Contains("the job that this process would join has ended"));
    CHECK_THAT(caught.text, Catch::Contains("group: 1, members: 2"));
    CHECK(caught.seconds < 5);  // of a patience of ten
  };
  auto first = store.make("first");
  auto second = store.make("second");
  at_once({[&] { first->enter("model"); }, [&] { second->enter("model"); }});
  at_once({join, [&] {  // while it waits
             std::this_thread::sleep_for(milliseconds(300));
             first->leave();
             second.reset();
           }});
  join();
  clear_regroup();
}

namespace {
std::string names_of(const std::vector<launch::Member>& members) {
  std::string names;
  for (const auto& member : members) {
    names += member.name + " ";
  }
  return names;
}
}  // namespace

TEST_CASE("A replica is in a list with all its ranks or with none", "[launch][members]") {
  const launch::Member a0{1, "a0", "a", 0}, a1{2, "a1", "a", 1}, b0{3, "b0", "b", 0},
      b1{4, "b1", "b", 1}, c0{5, "c0", "c", 0}, c1{6, "c1", "c", 1}, a0_again{7, "A0", "a", 0},
      a1_again{8, "A1", "a", 1};
  const std::vector<launch::Member> before{a0, a1, b0, b1};
  const auto whole = [](const auto& members, const auto& came) {
    return names_of(launch::whole_replicas(members, came, 2));
  };
  using Came = std::vector<launch::Member>;
  CHECK(whole(Came{}, Came{b1, a0, b0, a1}) == "b0 b1 a0 a1 ");
  CHECK(whole(before, Came{b1, b0, a1, a0}) == "a0 a1 b0 b1 ");
  CHECK(whole(before, Came{b1, b0, a1}) == "b0 b1 ");
  CHECK(whole(before, Came{b1, a1}) == "");
  CHECK(whole(before, Came{c1, a0, a1, b0, b1, c0}) == "a0 a1 b0 b1 c0 c1 ");
  CHECK(whole(before, Came{c1, a0, a1, b0, b1}) == "a0 a1 b0 b1 ");
  // A rank that was started again does not make a broken replica whole: the other has its state.
  CHECK(whole(before, Came{a1, b0, b1, a0_again}) == "b0 b1 ");
  CHECK(whole(before, Came{a1, b0, b1, a0_again, a1_again}) == "b0 b1 A0 A1 ");
  CHECK(whole(Came{}, Came{a0, a0_again, a1}) == "a0 a1 ");
  CHECK(names_of(launch::whole_replicas({a0}, {a0, b0}, 1)) == "a0 b0 ");
  CHECK(names_of(launch::replica_at(before, 3, 2)) == "b0 b1 ");
}

TEST_CASE("A rank that is gone takes its replica out, and one that is whole joins",
          "[launch][members]") {
  const Watchdog watchdog("replicas", std::chrono::seconds(60));
  Checks checks;
  Store store;
  store.world_size = 4;
  clear_regroup();
  std::vector<std::unique_ptr<Members>> all(4);
  std::vector<Membership> groups(4);
  const auto enter = [&](int i) {
    groups[i] = all[i]->enter("model", "part " + std::to_string(i % 2));
  };
  std::vector<std::function<void()>> begin;
  for (int i = 0; i < 4; ++i) {
    all[i] = store.make_rank(i < 2 ? "a" : "b", i % 2);
    begin.emplace_back([&, i] {
      enter(i);
      const auto& group = groups[i];
      checks.expect(group.world_size == 2 && group.group->getSize() == 2, "as many replicas");
      checks.expect(group.rank == group.group->getRank(), "the rank in its group");
      checks.expect(group.names[group.rank] == (i < 2 ? "a" : "b") + std::to_string(i % 2),
                    "names");
      checks.expect(group.pipeline_group->getRank() == i % 2, "the rank in its pipeline");
      checks.expect(all[i]->meet("a place"), "all have come");
      checks.expect(!all[i]->meet("another", i != 3), "one was not ready");
    });
  }
  at_once(begin);
  CHECK(checks.failures() == std::vector<std::string>{});
  const auto pipeline = groups[3].pipeline_group;
  all[0].reset();
  std::string left_out;
  at_once(
      {[&] { left_out = catching([&] { enter(1); }).text; }, [&] { enter(2); }, [&] { enter(3); }});
  CHECK(left_out.find("or another rank of its replica, did not come") != std::string::npos);
  CHECK(groups[2].world_size == 1);
  CHECK(groups[3].names == std::vector<std::string>{"b1"});
  CHECK(groups[3].pipeline_group == pipeline);
  all[1].reset();

  const auto joins = [&](int i) {
    all[i] = store.make_rank("a", i);
    enter(i);
  };
  const auto member = [&](int i) {
    while (!regroup_requested()) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    enter(i);
  };
  at_once({[&] { joins(0); }, [&] { member(2); }, [&] { member(3); },
           [&] {
             std::this_thread::sleep_for(milliseconds(100));
             checks.expect(!regroup_requested(), "half a replica does not ask to join");
             joins(1);
           }});
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK(groups[1].names == std::vector<std::string>{"b1", "a1"});
  CHECK(groups[0].rank == 1);
  CHECK(catching([&] {
          store.make_rank("c", 0)->enter("model", "other");
        }).text.find("there: part 0") != std::string::npos);
}

TEST_CASE("What can be no rank of a replica is refused", "[launch][members]") {
  Store store;
  store.world_size = 3;
  CHECK(catching([&] { store.make_rank("a", 0); }).text.find("multiple of pipeline_size") !=
        std::string::npos);
  store.world_size = 2;
  CHECK(catching([&] { store.make_rank("a", 2); }).type == Caught::Type::value_error);
  CHECK(catching([&] { store.make_rank("", 0); }).type == Caught::Type::value_error);
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
