// Waits for other ranks, which end when one of them has given up, and who is missing when a group breaks.
#include "reducer/group_link.h"

#include <brimful/log.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/format.h"
#include "base/torch_compat.h"
#include "reducer/device_wait.h"
#include "reducer/whole_path.h"

namespace brimful {
namespace {
constexpr int64_t kMissingPatience = 2000;              // ms
constexpr int64_t kLateBy = 500;                        // ms
constexpr int64_t kListenEvery = 500;                   // ms, while waiting for other ranks
constexpr FailureBoard::Patience kListenPatience{500};  // with a store that says who has given up

std::string prefix_of(uint64_t number) {
  return "brimful/" + std::to_string(number) + "/";
}
}  // namespace

GroupLink::GroupLink(Group of)
    : group(std::move(of)),
      rank(group->getRank()),
      world_size(group->getSize()),
      alone(world_size == 1 && !WholePath::is_on()),
      traffic(traffic_of(group.get())),
      configuration(configuration_of(*group)) {
  traffic->follow(configuration);
}

uint64_t GroupLink::next_number() {
  store = group->getStore();
  return static_cast<uint64_t>(store ? store->add("brimful/reducers/" + std::to_string(rank), 1)
                                     : ++traffic->numbers);
}

void GroupLink::open_board(uint64_t of_reducer, c10::Device of_last_bucket) {
  number = of_reducer;
  device = of_last_bucket;
  key = store ? prefix_of(number) : std::string();
  board.emplace(store, key);
}

void GroupLink::wait_for(c10d::Work& work, c10::Device of, const std::function<void()>& also,
                         std::optional<Clock::time_point> since) {
  const auto listen = [&] {
    if (also) {
      also();
    }
    if (is_given_up()) {
      throw std::runtime_error("another rank found the process group broken");
    }
  };
  if (!of.is_cpu() && world_size > 1) {
    wait_on_device(group, of, work, since.value_or(waiting_since_), listen);
    return;
  }
  while (store && world_size > 1) {
    try {
      work.wait(std::chrono::milliseconds(kListenEvery));
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        break;  // its own error, if it has one, comes now
      }
    }
    listen();
  }
  work.wait();
}

void GroupLink::wait_for(c10::ivalue::Future& future) {
  const auto give_up = [&](const char* why) {
    broken_ = std::make_exception_ptr(std::runtime_error(why));
  };
  auto listen_at = std::chrono::steady_clock::now() + std::chrono::milliseconds(kListenEvery);
  while (device.is_cpu() && store && world_size > 1 && !future.completed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    const auto now = std::chrono::steady_clock::now();
    if (hook_deadline_ && now > *hook_deadline_) {
      return give_up("the others did not come to a communication hook before this process ended");
    }
    if (now > listen_at) {
      if (is_given_up()) {
        return give_up("another rank found the process group broken");
      }
      listen_at += std::chrono::milliseconds(kListenEvery);
    }
  }
  future.wait();
}

bool GroupLink::is_given_up() {
  return traffic->knows_dead(world_size) || board->given_up(kListenPatience);
}

void GroupLink::require(c10::Device of) {
  if (of.is_cpu()) {
    return;
  }
  require_no_error(group, of);
  const auto now = std::chrono::steady_clock::now();
  const bool away =
      now - std::exchange(required_at_, now) > std::chrono::milliseconds(kListenEvery);
  if (away && is_given_up()) {
    waiting_since_ = decltype(waiting_since_)::max();
    throw std::runtime_error("the others have given up waiting for this rank");
  }
}

void GroupLink::give_up(std::exception_ptr error, int64_t at_step) {
  broken_ = std::move(error);
  auto failure = failure_of(broken_);
  failure.rank = rank;
  failure.step = at_step;
  board->try_post(failure);
  try {
    board->give_up(failure);
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("could not say that the group is broken: ") + e.what());
  }
  abort();
}

std::vector<std::vector<uint8_t>> GroupLink::exchange(const std::vector<uint8_t>& own,
                                                      int64_t at_step, const std::string& what) {
  count(&Reducer::Counters::exchanges);
  begin_wait();
  std::vector<std::vector<uint8_t>> all;
  if (!broken_) {
    call([&] {
      all = exchange_bytes(group, device, own, [&](c10d::Work& work) { wait_for(work, device); });
    });
  }
  require_whole(at_step, what);
  return all;
}

void GroupLink::require_whole(int64_t at_step, const std::string& waiting_for) {
  if (broken_) {
    throw_broken(at_step, waiting_for, to_string(broken_));
  }
}

void GroupLink::abort() {
  if (hosts_) {
    hosts_->abort();
  }
  try {
    traffic->aborting.abort(*group);
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("could not abort the process group: ") + e.what());
  }
}

namespace {
/// Where a rank says, when it finds the group broken, how long it has waited, and for what.
std::string wait_place(int rank) {
  return "waited/" + std::to_string(rank);
}

std::pair<int64_t, std::string> as_wait(const std::string& text) {
  const auto space = text.find(' ');
  return {std::stoll(text.substr(0, space)), text.substr(space + 1)};
}

/// Who found the group broken at once, where others had waited for it.
struct Latest {
  int rank = -1;
  int64_t waited_ms = 0;
  int64_t longest_ms = 0;

  void add(int of_rank, int64_t ms) {
    longest_ms = std::max(longest_ms, ms);
    if (rank < 0 || ms < waited_ms) {
      rank = of_rank;
      waited_ms = ms;
    }
  }
  bool known() const { return longest_ms - waited_ms >= kLateBy; }
  std::string text() const {
    return "rank " + std::to_string(rank) + " began to wait at least " +
           format_seconds(static_cast<double>(longest_ms - waited_ms) / 1000.0) +
           " after the rank that waited longest";
  }
};

std::string broken_text(int64_t at_step, int first, const std::string& missing,
                        const std::string& cause) {
  return "the process group broke in step " + std::to_string(at_step) + ": " +
         (missing.empty() ? "no rank is known to be missing" : missing) + " (cause: " + cause +
         "); look at " +
         (first < 0 ? "the other ranks' output" : "the output of the ranks that are named") +
         ", and start the job again";
}
}  // namespace

void GroupLink::throw_broken(int64_t at_step, const std::string& waiting_for,
                             const std::string& cause) {
  using std::chrono::milliseconds;
  const auto now = std::chrono::steady_clock::now();
  const auto since = std::min(waiting_since_, now);
  const auto waited = std::chrono::duration_cast<milliseconds>(now - since).count();
  const auto deadline = now + milliseconds(kMissingPatience);
  std::string missing;
  int first = -1;
  auto kind = Status::error;
  Latest latest;
  const auto add = [&](int of_rank, const std::string& text) {
    missing += (missing.empty() ? "rank " : "; rank ") + std::to_string(of_rank) + text;
    first = first < 0 ? of_rank : first;
  };
  // A rank that also finds the group broken says so; one that failed has posted it. Who does neither is missing.
  const auto ask = [&](int other) {
    auto wait = board->find(wait_place(other));
    for (; !wait; wait = board->find(wait_place(other))) {
      const auto failure = board->find(FailureBoard::place_of(at_step, other));
      const bool dead = traffic->is_dead && traffic->is_dead(other);
      if (failure || dead || std::chrono::steady_clock::now() > deadline) {
        add(other, failure ? " failed: " + to_string(*failure)
                           : " did not come (it left its loop, died or hangs)");
        kind = failure && failure->kind == Status::out_of_memory ? failure->kind : kind;
        return;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    const auto [ms, elsewhere] = as_wait(wait->text);
    latest.add(other, ms);
    if (elsewhere != waiting_for) {
      add(other, " waits for " + elsewhere + ", this one for " + waiting_for +
                     " (one of them left its loop)");
    }
  };
  try {
    const Failure own{rank, 0, at_step, Status::error, std::to_string(waited) + " " + waiting_for};
    board->post(wait_place(rank), own);
    board->give_up(own);
    abort();
    latest.add(rank, waited);
    for (int other = 0; store && other < world_size; ++other) {
      if (other != rank) {
        ask(other);
      }
    }
    if (missing.empty() && latest.known()) {
      first = latest.rank;
      missing = latest.text();
    }
  } catch (const std::exception&) {
    missing += std::string(missing.empty() ? "" : "; ") +
               "the store is gone too (the rank that serves it died or hangs)";
  }
  detail::throw_rank_failed(first, at_step, kind, broken_text(at_step, first, missing, cause));
}

bool is_reconfigured(const GroupLink& link) {
  return !link.configuration.empty() && link.group &&
         link.configuration != configuration_of(*link.group);
}

FailureBoard board_of(const GroupLink& link, uint64_t of_number) {
  return {link.store, prefix_of(of_number)};
}

}  // namespace brimful
