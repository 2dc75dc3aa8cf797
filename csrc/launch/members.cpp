#include <brimful/error.h>
#include <brimful/launch/members.h>
#include <brimful/log.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

#include "launch/gloo_group.h"
#include "launch/member_list.h"
#include "launch/nccl_group.h"
#include "launch/pulse.h"
#include "reducer/owners.h"

namespace brimful {
namespace {
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using launch::Member;
using launch::MemberList;

constexpr std::chrono::milliseconds kLookEvery{3};

StorePtr own_connection(const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>("brimful/members", store->clone());
}

/// One may take seconds where a host's name is looked up: it is made before the others wait for it.
std::future<StorePtr> connect_ahead(const StorePtr& store) {
  std::packaged_task<StorePtr()> connect([store] { return own_connection(store); });
  auto connection = connect.get_future();
  std::thread(std::move(connect)).detach();
  return connection;
}

std::string key_of(const char* what, int64_t epoch) {
  return std::string(what) + "/" + std::to_string(epoch);
}

/// What fails in it is the store.
template <typename Work>
auto asked(const Work& work) {
  try {
    return work();
  } catch (const std::exception& e) {
    throw StoreLost(
        "the store through which ranks find each other is gone, so that no new group can be "
        "formed; look at the host that serves it, and start the job again from a checkpoint "
        "(cause: " +
        std::string(e.what()) + ")");
  }
}

void require_options(const MembersOptions& options) {
  TORCH_CHECK_VALUE(options.world_size >= 1,
                    "a group has at least one rank (world_size: ", options.world_size, ")");
  TORCH_CHECK_VALUE(
      options.heartbeat.count() > 0 && options.dead_after >= 3 * options.heartbeat,
      "a process counts as dead after three heartbeats at the earliest (heartbeat_ms: ",
      options.heartbeat.count(), ", dead_after_ms: ", options.dead_after.count(), ")");
  TORCH_CHECK_VALUE(
      options.patience.count() > 0 && options.connect.count() > 0 && options.timeout.count() > 0,
      "timeouts must be positive (patience_ms: ", options.patience.count(),
      ", connect_ms: ", options.connect.count(), ", timeout_ms: ", options.timeout.count(), ")");
}
}  // namespace

LeftOut::LeftOut(const std::string& message)
    : c10::Error({__func__, __FILE__, __LINE__}, message) {}
StoreLost::StoreLost(const std::string& message)
    : c10::Error({__func__, __FILE__, __LINE__}, message) {}

class Members::State {
 public:
  State(const StorePtr& store, std::string name, MembersOptions given)
      : options_(std::move(given)), shared_(store) {
    require_options(options_);
    asked([&] { store_ = own_connection(store); });
    asked([&] { self_ = {store_->add("ids", 1), std::move(name)}; });
    asked([&] {
      pulse_ = std::make_shared<launch::Pulse>(own_connection(store), self_.id, options_.heartbeat,
                                               options_.dead_after);
    });
    next_connection_ = connect_ahead(store);
  }

  Membership enter(const std::string& model);
  void leave() noexcept { pulse_->leave(); }

 private:
  std::optional<MemberList> list_of(int64_t epoch);
  int64_t latest_epoch();
  void require_model(const std::string& theirs, const std::string& whose) const;
  void announce(int64_t epoch);
  std::vector<Member> entrants(int64_t epoch);
  MemberList await_list(int64_t epoch, const std::vector<Member>& before, bool member);
  std::vector<Member> come(const std::vector<Member>& before, const std::vector<Member>& entered);
  [[noreturn]] void throw_not_let_in(int64_t epoch, size_t entered) const;
  std::optional<Membership> form(const MemberList& list, int64_t epoch, const StorePtr& connection);
  Group await_group(std::future<Group> connecting, const MemberList& list, int64_t epoch);
  std::optional<Member> dead_of(const MemberList& list) const;

  MembersOptions options_;
  StorePtr store_;
  StorePtr shared_;                        ///< the program's, of which connections are made
  std::future<StorePtr> next_connection_;  ///< for the next group
  Member self_;
  std::string model_;
  std::shared_ptr<launch::Pulse> pulse_;
  int64_t epoch_ = 0;  ///< of which this process was a member
  std::optional<MemberList> current_;
  double waited_ms_ = 0;                   ///< for the last list
  std::shared_ptr<GroupTraffic> traffic_;  ///< has is_dead until a reducer of the group is made
};

std::optional<MemberList> Members::State::list_of(int64_t epoch) {
  return asked([&]() -> std::optional<MemberList> {
    if (!store_->check({key_of("list", epoch)})) {
      return std::nullopt;
    }
    const auto text = store_->get(key_of("list", epoch));
    return launch::decode_members({text.begin(), text.end()});
  });
}

int64_t Members::State::latest_epoch() {
  return asked([&] {
    int64_t epoch = store_->add("epoch", 0);  // a lower bound
    while (store_->check({key_of("list", epoch + 1)})) {
      ++epoch;
    }
    return epoch;
  });
}

void Members::State::require_model(const std::string& theirs, const std::string& whose) const {
  if (model_ != theirs) {
    throw PlanMismatch("this process has another model or program than " + whose +
                       " (here: " + model_ + "; there: " + theirs +
                       "); start it with the same model and the same versions");
  }
}

void Members::State::announce(int64_t epoch) {
  asked([&] {
    const auto place = store_->add(key_of("entered", epoch), 1);
    store_->set(key_of("entrant", epoch) + "/" + std::to_string(place),
                launch::encode_members({model_, {self_}}));
  });
}

/// In the order in which they came.
std::vector<Member> Members::State::entrants(int64_t epoch) {
  std::vector<Member> found;
  const auto count = asked([&] { return store_->add(key_of("entered", epoch), 0); });
  for (int64_t place = 1; place <= count; ++place) {
    const auto key = key_of("entrant", epoch) + "/" + std::to_string(place);
    const auto entrant = asked([&]() -> std::optional<MemberList> {
      if (!store_->check({key})) {
        return std::nullopt;  // it is about to be written, or its process has died
      }
      const auto text = store_->get(key);
      return launch::decode_members({text.begin(), text.end()});
    });
    if (entrant && epoch == 1) {
      require_model(entrant->model, entrant->members[0].name);
    }
    if (entrant && entrant->model == model_) {
      found.push_back(entrant->members[0]);
    }
  }
  return found;
}

/// Those who live and have come: members first, by rank, then who joins.
std::vector<Member> Members::State::come(const std::vector<Member>& before,
                                         const std::vector<Member>& entered) {
  std::vector<Member> all;
  const auto add = [&](const std::vector<Member>& from, bool members) {
    for (const auto& each : from) {
      if (launch::has(entered, each.id) && launch::has(before, each.id) == members &&
          !pulse_->is_dead(each.id) && !launch::has(all, each.id)) {
        all.push_back(each);
      }
    }
  };
  add(before, true);
  add(entered, false);
  return all;
}

void Members::State::throw_not_let_in(int64_t epoch, size_t entered) const {
  C10_THROW_ERROR(
      DistError, c10::str("no group was formed within the patience (group: ", epoch,
                          ", processes that came: ", entered, ", world_size: ", options_.world_size,
                          ", patience_ms: ", options_.patience.count(),
                          "): processes that it waits for did not start, or its members do not "
                          "step or are dead; look at their output"));
}

MemberList Members::State::await_list(int64_t epoch, const std::vector<Member>& before,
                                      bool member) {
  const auto until = Clock::now() + options_.patience;
  while (true) {
    if (auto list = list_of(epoch)) {
      return *list;
    }
    const auto entered = entrants(epoch);
    pulse_->watch(launch::ids_of(before));
    pulse_->watch(launch::ids_of(entered));
    const bool late = Clock::now() > until;
    const bool all_came = epoch == 1
                              ? entered.size() >= static_cast<size_t>(options_.world_size)
                              : std::all_of(before.begin(), before.end(), [&](const Member& each) {
                                  return launch::has(entered, each.id) || pulse_->is_dead(each.id);
                                });
    // Who joins has no state to go on with: without a member there is no job to join.
    if (epoch == 1 ? all_came : member && (all_came || late)) {
      const MemberList own{model_, come(before, entered)};
      const auto text = launch::encode_members(own);
      asked([&] { store_->compareSet(key_of("list", epoch), std::string(), text); });
      continue;
    }
    if (late) {
      throw_not_let_in(epoch, entered.size());
    }
    if (pulse_->is_lost()) {
      asked([&] { store_->check({key_of("list", epoch)}); });
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

std::optional<Member> Members::State::dead_of(const MemberList& list) const {
  for (const auto& member : list.members) {
    if (pulse_->is_dead(member.id)) {
      return member;
    }
  }
  return std::nullopt;
}

/// Null where it cannot be formed.
Group Members::State::await_group(std::future<Group> connecting, const MemberList& list,
                                  int64_t epoch) {
  const auto failed = key_of("failed", epoch);
  std::string why;
  while (connecting.wait_for(kLookEvery) != std::future_status::ready) {
    if (const auto dead = dead_of(list)) {
      why = dead->name + " died while the group was formed";
    } else if (asked([&] { return store_->check({failed}); })) {
      why = "another rank could not connect";
    }
    if (!why.empty()) {
      break;
    }
  }
  if (why.empty()) {
    try {
      return connecting.get();
    } catch (const std::exception& e) {
      why = e.what();
    }
  }
  log(LogLevel::info, "group " + std::to_string(epoch) + " is formed again (cause: " + why + ")");
  asked([&] { store_->set(failed, std::string("failed")); });
  return nullptr;
}

std::optional<Membership> Members::State::form(const MemberList& list, int64_t epoch,
                                               const StorePtr& connection) {
  const int rank = launch::rank_of(list, self_.id);
  const auto size = static_cast<int>(list.members.size());
  pulse_->watch(launch::ids_of(list.members));
  // The rendezvous waits in the store, and is left to itself where a rank is missing.
  std::packaged_task<Group()> connect(
      [rank, size, options = options_,
       store = c10::make_intrusive<c10d::PrefixStore>("group/" + std::to_string(epoch),
                                                      connection)]() -> Group {
        store->setTimeout(options.connect);
        auto group = launch::make_gloo_group(store, rank, size, launch::GlooDevice::of_host,
                                             options.connect);
        if (options.device && !options.device->is_cpu()) {
          launch::keep_process_on_nccl_errors();
          launch::add_nccl(*group, store, rank, size, *options.device, options.timeout);
        }
        store->setTimeout(options.timeout);
        group->setTimeout(options.timeout);
        return group;
      });
  auto connecting = connect.get_future();
  std::thread(std::move(connect)).detach();
  auto group = await_group(std::move(connecting), list, epoch);
  if (!group) {
    return std::nullopt;
  }
  traffic_ = traffic_of(group.get());
  traffic_->is_dead = [pulse = pulse_, ids = launch::ids_of(list.members)](int of) {
    return pulse->is_dead(ids.at(of));
  };
  Membership made{std::move(group), epoch, rank, size, {}, waited_ms_};
  for (const auto& member : list.members) {
    made.names.push_back(member.name);
  }
  return made;
}

Membership Members::State::enter(const std::string& model) {
  model_ = launch::one_line(model);
  while (true) {
    const bool member = current_.has_value();
    const auto epoch = (member ? epoch_ : latest_epoch()) + 1;
    const auto before = member ? current_ : list_of(epoch - 1);
    if (!member && before) {
      require_model(before->model, "the members of the group");
      asked([&] { store_->add(launch::Pulse::joins_key(epoch - 1), 1); });
    }
    // Who has announced itself is expected to connect at once.
    const auto connection = asked([&] { return next_connection_.get(); });
    next_connection_ = connect_ahead(shared_);
    announce(epoch);
    const auto begun = Clock::now();
    const auto list = await_list(epoch, before ? before->members : std::vector<Member>{}, member);
    waited_ms_ = std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
    if (launch::rank_of(list, self_.id) < 0) {
      if (!member) {
        continue;  // the members were forming it already: the next one
      }
      throw LeftOut("the others formed group " + std::to_string(epoch) + " without this process (" +
                    self_.name +
                    "), since it did not come or was silent for too long (dead_after_ms: " +
                    std::to_string(options_.dead_after.count()) +
                    "); what it has is out of date: start it again, and it joins the next group");
    }
    asked([&] { store_->set("epoch", std::to_string(epoch)); });
    epoch_ = epoch;
    current_ = list;
    if (auto made = form(list, epoch, connection)) {
      pulse_->watch_joins(epoch);
      return std::move(*made);
    }
  }
}

Members::Members(const StorePtr& store, std::string name, MembersOptions options) {
  TORCH_CHECK_VALUE(store, "processes find each other through a store (store: null)");
  state_ = std::make_unique<State>(store, launch::one_line(std::move(name)), std::move(options));
}
Members::~Members() {
  leave();
}

Membership Members::enter(const std::string& model) {
  return state_->enter(model);
}

void Members::leave() noexcept {
  state_->leave();
}

}  // namespace brimful
