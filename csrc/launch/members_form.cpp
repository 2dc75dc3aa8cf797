// The processes of a list connect, all or none.
#include <brimful/log.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>
#include <utility>

#include "launch/all_or_none.h"
#include "launch/gloo_group.h"
#include "launch/members_state.h"
#include "launch/nccl_group.h"
#include "launch/whole_replicas.h"

namespace brimful {
namespace {
constexpr std::chrono::milliseconds kConnectedEvery{3};

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

Group make_member_group(const StorePtr& store, int rank, int size, const MembersOptions& options) {
  store->setTimeout(options.connect);
  auto group =
      launch::make_gloo_group(store, rank, size, launch::GlooDevice::of_host, options.connect);
  if (options.device && !options.device->is_cpu()) {
    launch::keep_process_on_nccl_errors();
    launch::add_nccl(*group, store, rank, size, *options.device, options.timeout);
  }
  store->setTimeout(options.timeout);
  group->setTimeout(options.timeout);
  return group;
}

/// `place` in a list of `size`. Its rendezvous waits in the store.
launch::Groups connect_ranks(const StorePtr& connection, int64_t epoch, int place, int size,
                             const MembersOptions& options, bool makes_pipeline) {
  const int ranks = options.pipeline_size;
  const auto join = [&](const char* kind, int number, int rank, int of) {
    return make_member_group(
        c10::make_intrusive<c10d::PrefixStore>(
            std::string(kind) + "/" + std::to_string(epoch) + "/" + std::to_string(number),
            connection),
        rank, of, options);
  };
  launch::Groups made;
  made.replicas = join("group", place % ranks, place / ranks, size / ranks);
  if (makes_pipeline) {
    made.pipeline = join("pipeline", place / ranks, place % ranks, ranks);
  }
  return made;
}
}  // namespace

using launch::asked;
using launch::key_of;

std::optional<launch::Member> Members::State::dead_of(const MemberList& list) const {
  for (const auto& member : list.members) {
    if (pulse_->is_dead(member.id)) {
      return member;
    }
  }
  return std::nullopt;
}

/// Empty where they cannot be formed.
launch::Groups Members::State::await_groups(std::future<launch::Groups> connecting,
                                            const MemberList& list, int64_t epoch) {
  const auto formed = key_of("formed", epoch);
  std::string why;
  const auto is_over = [&] {
    if (const auto dead = dead_of(list)) {
      why = dead->name + " died while the group was formed";
    }
    return !why.empty();
  };
  bool decided = false;
  while (!decided && !is_over() &&
         connecting.wait_for(kConnectedEvery) != std::future_status::ready) {
    decided = asked([&] { return launch::is_decided(*store_, formed); });
  }
  launch::Groups made;
  if (!decided && why.empty()) {
    try {
      made = connecting.get();
    } catch (const std::exception& e) {
      why = e.what();
    }
  }
  const bool all = asked([&] {
    return launch::all_or_none(*store_, formed, std::ssize(list.members), made.replicas != nullptr,
                               is_over);
  });
  if (!all) {
    log(LogLevel::info, "group " + std::to_string(epoch) + " is formed again (cause: " +
                            (why.empty() ? "another rank could not connect" : why) + ")");
    return {};
  }
  return made;
}

/// A rank whose pipeline has lost another one takes part in no more steps.
void Members::State::watch_dead(const MemberList& list, const Group& group) {
  traffic_ = traffic_of(group.get());
  std::vector<std::vector<int64_t>> replicas;
  for (size_t place = 0; place < list.members.size(); place += options_.pipeline_size) {
    replicas.push_back(
        launch::ids_of(launch::replica_at(list.members, place, options_.pipeline_size)));
  }
  traffic_->is_dead = [pulse = pulse_, replicas = std::move(replicas)](int of) {
    const auto& ids = replicas.at(of);
    return std::any_of(ids.begin(), ids.end(), [&](int64_t id) { return pulse->is_dead(id); });
  };
}

std::optional<Membership> Members::State::form(const MemberList& list, int64_t epoch,
                                               const StorePtr& connection) {
  pulse_->watch(launch::ids_of(list.members));
  const int place = launch::rank_of(list, self_.id);
  const auto size = static_cast<int>(list.members.size());
  const int ranks = options_.pipeline_size;
  // In a thread that is left to itself where a rank is missing.
  std::packaged_task<launch::Groups()> connecting(
      [=, options = options_, makes_pipeline = ranks > 1 && !pipeline_] {
        return connect_ranks(connection, epoch, place, size, options, makes_pipeline);
      });
  auto connected = connecting.get_future();
  std::thread(std::move(connecting)).detach();
  auto groups = await_groups(std::move(connected), list, epoch);
  if (!groups.replicas) {
    return std::nullopt;
  }
  pipeline_ = groups.pipeline ? groups.pipeline : pipeline_;
  watch_dead(list, groups.replicas);
  Membership made{
      std::move(groups.replicas), epoch, place / ranks, size / ranks, {}, waited_ms_, pipeline_};
  for (int other = place % ranks; other < size; other += ranks) {
    made.names.push_back(list.members.at(other).name);
  }
  return made;
}

bool Members::State::meet(const std::string& place, bool ready) {
  TORCH_CHECK(current_.has_value(), "this process is in no group yet (place: ", place,
              "); call enter() first");
  const auto until = std::chrono::steady_clock::now() + options_.patience;
  return asked([&] {
    return launch::all_or_none(
        *store_, key_of("met/" + launch::one_line(place), epoch_), std::ssize(current_->members),
        ready,
        [&] { return dead_of(*current_).has_value() || std::chrono::steady_clock::now() > until; });
  });
}

}  // namespace brimful
