#include <brimful/error.h>
#include <brimful/launch/members.h>
#include <brimful/log.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

#include "launch/members_state.h"
#include "launch/whole_replicas.h"

namespace brimful {
namespace launch {
std::string key_of(const std::string& what, int64_t epoch) {
  return what + "/" + std::to_string(epoch);
}

void throw_store_lost(const std::string& cause) {
  throw StoreLost(
      "the store through which ranks find each other is gone, so that no new group can be "
      "formed; look at the host that serves it, and start the job again from a checkpoint "
      "(cause: " +
      cause + ")");
}
}  // namespace launch

namespace {
using launch::asked;
using launch::key_of;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookEvery{3};
constexpr int kDeadFor = 10;  // times `dead_after`

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

void require_options(const MembersOptions& options) {
  TORCH_CHECK_VALUE(options.world_size >= 1,
                    "a group has at least one rank (world_size: ", options.world_size, ")");
  TORCH_CHECK_VALUE(
      options.heartbeat.count() > 0 && options.dead_after >= 3 * options.heartbeat,
      "heartbeat_ms must be positive, and dead_after_ms at least three times it (heartbeat_ms: ",
      options.heartbeat.count(), ", dead_after_ms: ", options.dead_after.count(), ")");
  TORCH_CHECK_VALUE(
      options.patience.count() > 0 && options.connect.count() > 0 && options.timeout.count() > 0,
      "timeouts must be positive (patience_ms: ", options.patience.count(),
      ", connect_ms: ", options.connect.count(), ", timeout_ms: ", options.timeout.count(), ")");
  const int ranks = options.pipeline_size;
  TORCH_CHECK_VALUE(ranks >= 1 && options.pipeline_rank >= 0 && options.pipeline_rank < ranks,
                    "pipeline_rank must be from 0 to pipeline_size - 1 (pipeline_rank: ",
                    options.pipeline_rank, ", pipeline_size: ", ranks, ")");
  TORCH_CHECK_VALUE(
      options.world_size % ranks == 0,
      "world_size must be a multiple of pipeline_size (world_size: ", options.world_size,
      ", pipeline_size: ", ranks, "); start pipeline_size processes for each replica");
  TORCH_CHECK_VALUE(ranks == 1 || !options.replica.empty(),
                    "the ranks of a pipeline find each other by its name (replica: none, "
                    "pipeline_size: ",
                    ranks, "); give all of them the same, and each pipeline another one");
}
}  // namespace

LeftOut::LeftOut(const std::string& message)
    : c10::Error({__func__, __FILE__, __LINE__}, message) {}
StoreLost::StoreLost(const std::string& message)
    : c10::Error({__func__, __FILE__, __LINE__}, message) {}

Members::State::State(const StorePtr& store, std::string name, MembersOptions given)
    : options_(std::move(given)), shared_(store) {
  require_options(options_);
  asked([&] { store_ = own_connection(store); });
  asked([&] {
    self_ = {store_->add("ids", 1), std::move(name), launch::one_line(options_.replica),
             options_.pipeline_rank};
  });
  asked([&] {
    pulse_ = std::make_shared<launch::Pulse>(own_connection(store), self_.id, options_.heartbeat,
                                             options_.dead_after);
  });
  next_connection_ = connect_ahead(store);
}

std::optional<launch::MemberList> Members::State::list_of(int64_t epoch) {
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

/// The first process of a rank has it put down for all that come later.
void Members::State::require_part(const std::string& part) {
  const auto known = asked([&] {
    return store_->compareSet(key_of("part", options_.pipeline_rank), std::string(), part);
  });
  if (known != part) {
    throw PlanMismatch(
        "this process has another part of the model than the others of its rank "
        "(pipeline_rank: " +
        std::to_string(options_.pipeline_rank) + ", here: " + part + "; there: " + known +
        "); start it with the same stages");
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
std::vector<launch::Member> Members::State::entrants(int64_t epoch) {
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
    if (entrant && entrant->model == model_ &&
        entrant->members[0].pipeline_rank < options_.pipeline_size) {
      found.push_back(entrant->members[0]);
    }
  }
  return found;
}

/// Each once.
std::vector<launch::Member> Members::State::living(const std::vector<Member>& entered) const {
  std::vector<Member> all;
  for (const auto& each : entered) {
    if (!pulse_->is_dead(each.id) && !launch::has(all, each.id)) {
      all.push_back(each);
    }
  }
  return all;
}

bool Members::State::is_broken(const std::vector<Member>& replica) const {
  return std::any_of(replica.begin(), replica.end(),
                     [&](const Member& each) { return pulse_->is_dead(each.id); });
}

/// All who are to go on: of a replica that is broken none is waited for.
bool Members::State::all_came(int64_t epoch, const std::vector<Member>& before,
                              const std::vector<Member>& entered) const {
  const int ranks = options_.pipeline_size;
  if (epoch == 1) {
    return std::ssize(launch::whole_replicas({}, entered, ranks)) >= options_.world_size;
  }
  for (size_t place = 0; place < before.size(); place += ranks) {
    const auto replica = launch::replica_at(before, place, ranks);
    const bool came = std::all_of(replica.begin(), replica.end(), [&](const Member& each) {
      return launch::has(entered, each.id);
    });
    if (!came && !is_broken(replica)) {
      return false;
    }
  }
  return true;
}

void Members::State::throw_not_let_in(int64_t epoch, size_t entered) const {
  C10_THROW_ERROR(
      DistError, c10::str("no group was formed within the patience (group: ", epoch,
                          ", processes that came: ", entered, ", world_size: ", options_.world_size,
                          ", patience_ms: ", options_.patience.count(),
                          "): processes that it waits for did not start, or its members do not "
                          "step or are dead; look at their output",
                          options_.pipeline_size == 1
                              ? ""
                              : ", and at replica and pipeline_rank, which make whole replicas"));
}

/// Whoever would let this process in has gone: left, or been dead for so long that it was no pause of the machine.
bool Members::State::have_gone(const std::vector<Member>& before, Clock::time_point begun) const {
  const auto all = [&](const auto& is) {
    return std::all_of(before.begin(), before.end(),
                       [&](const Member& each) { return is(each.id); });
  };
  if (before.empty()) {
    return false;
  }
  return all([&](int64_t id) { return pulse_->has_left(id); }) ||
         (Clock::now() - begun > kDeadFor * options_.dead_after &&
          all([&](int64_t id) { return pulse_->is_dead(id); }));
}

void Members::State::throw_has_ended(int64_t epoch, const std::vector<Member>& before) {
  C10_THROW_ERROR(
      DistError,
      c10::str("the job that this process would join has ended: all members of its last "
               "group have left, or are dead (group: ",
               epoch - 1, ", members: ", before.size(),
               "); a job that begins anew needs a store, or a prefix in it, of its own"));
}

launch::MemberList Members::State::await_list(int64_t epoch, const std::vector<Member>& before,
                                              bool member) {
  const auto begun = Clock::now();
  const auto until = begun + options_.patience;
  bool asks = !member && epoch > 1;
  while (true) {
    if (auto list = list_of(epoch)) {
      return *list;
    }
    const auto entered = entrants(epoch);
    pulse_->watch(launch::ids_of(before));
    pulse_->watch(launch::ids_of(entered));
    const bool late = Clock::now() > until;
    const bool complete = all_came(epoch, before, entered);
    const auto whole = launch::whole_replicas(before, living(entered), options_.pipeline_size);
    if (asks && launch::has(whole, self_.id)) {  // not before its replica can join
      asks = false;
      asked([&] { store_->add(launch::Pulse::joins_key(epoch - 1), 1); });
    }
    // Who joins has no state to go on with: without a member there is no job to join.
    if (epoch == 1 ? complete : member && (complete || late)) {
      const auto text = launch::encode_members({model_, whole});
      asked([&] { store_->compareSet(key_of("list", epoch), std::string(), text); });
      continue;
    }
    if (late) {
      throw_not_let_in(epoch, entered.size());
    }
    if (!member && epoch > 1 && have_gone(before, begun) && !list_of(epoch)) {
      throw_has_ended(epoch, before);
    }
    if (pulse_->is_lost()) {
      asked([&] { store_->check({key_of("list", epoch)}); });
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

void Members::State::throw_left_out(int64_t epoch, const std::vector<Member>& before) {
  const auto number = std::to_string(epoch);
  const auto until = Clock::now() + 2 * options_.dead_after;
  const auto place = std::find_if(before.begin(), before.end(),
                                  [&](const Member& each) { return each.id == self_.id; });
  auto ranks = launch::replica_at(before, place - before.begin(), options_.pipeline_size);
  std::erase_if(ranks, [&](const Member& each) { return each.id == self_.id; });
  while (!ranks.empty() && Clock::now() < until) {  // another process may have seen it first
    for (const auto& each : ranks) {
      if (pulse_->is_dead(each.id) && !pulse_->has_left(each.id)) {
        throw LeftOut("replica " + self_.replica + " cannot go on without its rank " +
                      std::to_string(each.pipeline_rank) + ", which died (" + each.name +
                      "); the others formed group " + number + " without this process (" +
                      self_.name + ", rank " + std::to_string(self_.pipeline_rank) +
                      "): start all ranks of the replica again, and it joins the next group");
      }
    }
    std::this_thread::sleep_for(kLookEvery);
  }
  throw LeftOut("the others formed group " + number + " without this process (" + self_.name +
                "), since it" + (ranks.empty() ? "" : ", or another rank of its replica,") +
                " did not come or was silent for too long (dead_after_ms: " +
                std::to_string(options_.dead_after.count()) +
                "); what it has is out of date: start it again, and it joins the next group");
}

Membership Members::State::enter(const std::string& model, const std::string& part) {
  model_ = launch::one_line(model);
  if (!part.empty()) {
    require_part(launch::one_line(part));
  }
  while (true) {
    const bool member = current_.has_value();
    const auto epoch = (member ? epoch_ : latest_epoch()) + 1;
    const auto before = member ? current_ : list_of(epoch - 1);
    if (!member && before) {
      require_model(before->model, "the members of the group");
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
      throw_left_out(epoch, before->members);
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

Membership Members::enter(const std::string& model, const std::string& part) {
  return state_->enter(model, part);
}

int Members::pipeline_size() const {
  return state_->pipeline_size();
}

bool Members::meet(const std::string& place, bool ready) {
  return state_->meet(place, ready);
}

void Members::leave() noexcept {
  state_->leave();
}

}  // namespace brimful
