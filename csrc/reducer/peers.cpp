// Words between ranks, through the process group's store: why a rank failed, and who is missing when a group breaks.
#include <brimful/log.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_map>
#include <utility>

#include "reducer/at_exit.h"
#include "reducer/device_wait.h"
#include "reducer/reducer_state.h"

namespace brimful {
namespace {
constexpr int64_t kMissingPatience = 2000;              // ms
constexpr int64_t kLateBy = 500;                        // ms
constexpr int64_t kListenEvery = 500;                   // ms, while waiting for other ranks
constexpr FailureBoard::Patience kListenPatience{500};  // with a store that says who has given up
}  // namespace

// A process group's threads may hold tensors of Python, which need an interpreter to die: its last owner must let go, and
// so join them, before the interpreter ends.
namespace {
struct Releases {
  std::mutex mutex;
  std::unordered_map<const void*, std::function<void()>> by_owner;
};
Releases& releases() {
  static auto* instance = new Releases;
  return *instance;
}
}  // namespace

void release_at_exit(const void* owner, std::function<void()> release) {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  releases().by_owner[owner] = std::move(release);
}

void forget_at_exit(const void* owner) {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  releases().by_owner.erase(owner);
}

int64_t registered_at_exit() {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  return static_cast<int64_t>(releases().by_owner.size());
}

void release_groups() {
  decltype(Releases::by_owner) all;
  {
    const std::lock_guard<std::mutex> lock(releases().mutex);
    all.swap(releases().by_owner);
  }
  for (const auto& [owner, release] : all) {
    release();  // without the lock: it may hold the last reference to a reducer, which then forgets itself
  }
}

FailureBoard Reducer::State::board_of(uint64_t of_number) const {
  return {store, "brimful/" + std::to_string(of_number) + "/"};
}

std::string Reducer::State::turn_place(int64_t at_turn, int of_rank) {
  return "turn/" + std::to_string(at_turn) + "/" + std::to_string(of_rank);
}

void Reducer::publish_failure(FailureKind kind, const std::string& text) {
  leave_word({s_->rank, 0, s_->step, kind, text});
}

void Reducer::leave_word(const Failure& failure) {
  auto& s = *s_;
  if (s.parting) {
    s.board_of(s.parting_number).try_post(State::turn_place(s.turn, s.rank), failure);
  } else {
    s.board->try_post(failure);
  }
}

void Reducer::abandon() {
  break_chain(std::make_exception_ptr(
      std::runtime_error("this rank left a step whose collectives it could not match")));
  wait_for_buckets();
  end_attempt();
}

// A rank that waits for one that is well does not notice that the group broke: it would wait until the group's timeout.
void Reducer::wait_for(c10d::Work& work, c10::Device device) {
  wait_for(work, device, s_->waiting_since);
}

void Reducer::wait_for(c10d::Work& work, c10::Device device,
                       std::chrono::steady_clock::time_point left_at) {
  auto& s = *s_;
  const auto listen = [&] {
    if (s.told_broken()) {
      throw std::runtime_error("another rank found the process group broken");
    }
  };
  if (!device.is_cpu() && s.world_size > 1) {
    wait_on_device(s.group, device, work, left_at, listen);
    return;
  }
  while (s.store && s.world_size > 1) {
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

void Reducer::wait_for_hook(c10::ivalue::Future& future) {
  auto& s = *s_;
  const auto give_up = [&](const char* why) {
    s.broken = std::make_exception_ptr(std::runtime_error(why));
  };
  auto listen_at = std::chrono::steady_clock::now() + std::chrono::milliseconds(kListenEvery);
  while (s.device.is_cpu() && s.store && s.world_size > 1 && !future.completed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    const auto now = std::chrono::steady_clock::now();
    if (s.hook_deadline && now > *s.hook_deadline) {
      return give_up("the others did not come to a communication hook before this process ended");
    }
    if (now > listen_at) {
      if (s.told_broken()) {
        return give_up("another rank found the process group broken");
      }
      listen_at += std::chrono::milliseconds(kListenEvery);
    }
  }
  future.wait();
}

bool Reducer::State::told_broken() {
  return board->given_up(kListenPatience);
}

void Reducer::State::require_group(c10::Device of) {
  if (of.is_cpu()) {
    return;
  }
  require_no_error(group, of);
  const auto now = std::chrono::steady_clock::now();
  const bool away = now - std::exchange(required_at, now) > std::chrono::milliseconds(kListenEvery);
  if (away && told_broken()) {
    waiting_since = decltype(waiting_since)::max();
    throw std::runtime_error("the others have given up waiting for this rank");
  }
}

/// This rank cannot make the collectives that the others wait for: in a communication hook, or its device is lost. Over gloo
/// the end of a group ends no wait of theirs, so they are informed.
void Reducer::break_chain(std::exception_ptr error) {
  auto& s = *s_;
  s.broken = std::move(error);
  const auto failure = failure_of(s.broken);
  publish_failure(failure.kind, failure.text);
  try {
    s.board->give_up(failure);
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("could not say that the group is broken: ") + e.what());
  }
  abort_group();
}

void Reducer::abort_group() {
  try {
    s_->group->abort();
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
    return "rank " + std::to_string(rank) + " came " +
           std::to_string((longest_ms - waited_ms) / 1000.0).substr(0, 3) +
           " s after the first, which did not wait so long";
  }
};
}  // namespace

void Reducer::throw_broken(int64_t at_step, const std::string& waiting_for,
                           const std::string& cause) {
  using std::chrono::milliseconds;
  auto& s = *s_;
  const auto now = std::chrono::steady_clock::now();
  const auto since = std::min(s.waiting_since, now);
  const auto waited = std::chrono::duration_cast<milliseconds>(now - since).count();
  const auto deadline = now + milliseconds(kMissingPatience);
  std::string missing;
  int first = -1;
  auto kind = Status::error;
  Latest latest;
  const auto add = [&](int rank, const std::string& text) {
    missing += (missing.empty() ? "rank " : "; rank ") + std::to_string(rank) + text;
    first = first < 0 ? rank : first;
  };
  // A rank that also finds the group broken says so; one that failed left its words. Who does neither is missing.
  const auto ask = [&](int rank) {
    auto wait = s.board->find(wait_place(rank));
    for (; !wait; wait = s.board->find(wait_place(rank))) {
      const auto failure = s.board->find(FailureBoard::place_of(at_step, rank));
      if (failure || std::chrono::steady_clock::now() > deadline) {
        add(rank, failure ? " failed: " + to_string(*failure)
                          : " did not come (it left its loop, died or hangs)");
        kind = failure && failure->kind == Status::out_of_memory ? failure->kind : kind;
        return;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    const auto [ms, elsewhere] = as_wait(wait->text);
    latest.add(rank, ms);
    if (elsewhere != waiting_for) {
      add(rank, " waits for " + elsewhere + ", this one for " + waiting_for +
                    " (one of them left its loop)");
    }
  };
  try {
    const Failure own{s.rank, 0, at_step, Status::error,
                      std::to_string(waited) + " " + waiting_for};
    s.board->post(wait_place(s.rank), own);
    s.board->give_up(own);
    abort_group();
    latest.add(s.rank, waited);
    for (int rank = 0; s.store && rank < s.world_size; ++rank) {
      if (rank != s.rank) {
        ask(rank);
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
  detail::throw_rank_failed(first, at_step, kind,
                            "the process group broke in step " + std::to_string(at_step) + ": " +
                                (missing.empty() ? "no rank is missing" : missing) +
                                " (cause: " + cause + ")");
}

}  // namespace brimful
