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
constexpr int64_t kMissingPatience = 2000;  // ms
constexpr int64_t kLateBy = 500;            // ms
constexpr int64_t kListenEvery = 500;       // ms, while waiting for other ranks
constexpr const char* kMemoryPrefix = "out of memory: ";

std::vector<uint8_t> as_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string as_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}
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

std::string Reducer::State::failure_key(int64_t at_step, int of_rank) const {
  return key + "failed/" + std::to_string(at_step) + "/" + std::to_string(of_rank);
}

void Reducer::publish_failure(FailureKind kind, const std::string& text) {
  leave_words(s_->step, kind, text);
}

void Reducer::leave_words(int64_t at_step, FailureKind kind, const std::string& text) {
  auto& s = *s_;
  if (!s.store) {
    return;
  }
  const auto words = (kind == Status::out_of_memory ? kMemoryPrefix : "") + text;
  const auto key =
      s.parting ? s.turn_key(s.parting_number, s.turn, s.rank) : s.failure_key(at_step, s.rank);
  try {
    // The first words stay: later ones know less.
    s.store->compareSet(key, {}, as_bytes(words));
  } catch (const std::exception& e) {
    log(LogLevel::warning,
        std::string("could not leave word of a failure for the other ranks: ") + e.what());
  }
}

std::string Reducer::read_failure(int rank, int64_t patience_ms) {
  return read_words(s_->failure_key(s_->step - 1, rank), patience_ms);
}

std::string Reducer::read_words(const std::string& key, int64_t patience_ms) {
  auto& s = *s_;
  if (!s.store) {
    return "(its process group has no store to read its words from)";
  }
  try {
    s.store->wait({key}, std::chrono::milliseconds(patience_ms));
    return as_text(s.store->get(key));
  } catch (const std::exception&) {
    return "(its words did not arrive; see that rank's own output)";
  }
}

void Reducer::abandon(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  publish_failure(kind, text);
  s.broken = std::make_exception_ptr(
      std::runtime_error("this rank left a step whose collectives it could not match"));
  abort_group();
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

bool Reducer::State::told_broken() const {
  try {
    return store && store->check({key + "broken"});
  } catch (const std::exception&) {
    return false;  // the store's rank died: the group's own timeout ends the wait
  }
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

/// This rank cannot make the collectives that the others wait for in a communication hook.
void Reducer::break_chain(std::exception_ptr error) {
  auto& s = *s_;
  s.broken = std::move(error);
  publish_failure(is_out_of_memory(s.broken) ? Status::out_of_memory : Status::error,
                  describe(s.broken));
  try {
    if (s.store) {
      s.store->set(s.key + "broken", as_bytes("a communication hook"));
    }
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

std::optional<PeerFailure> Reducer::failed_peer() {
  auto& s = *s_;
  for (int rank = 0; s.store && rank < s.world_size; ++rank) {
    try {
      const auto key = s.failure_key(s.step, rank);
      if (rank != s.rank && s.store->check({key})) {
        return PeerFailure{rank, as_text(s.store->get(key))};
      }
    } catch (const std::exception&) {
      return std::nullopt;  // the store's rank died
    }
  }
  return std::nullopt;
}

namespace {
/// What a rank leaves for the others when it finds the group broken: how long it has waited, and for what.
std::vector<uint8_t> as_bytes(int64_t waited_ms, const std::string& waiting_for) {
  return as_bytes(std::to_string(waited_ms) + " " + waiting_for);
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
  const auto here = s.key + "broken/";
  const auto now = std::chrono::steady_clock::now();
  const auto since = std::min(s.waiting_since, now);
  const auto waited = std::chrono::duration_cast<milliseconds>(now - since).count();
  const auto deadline = now + milliseconds(kMissingPatience);
  std::string missing;
  int first = -1;
  Latest latest;
  const auto add = [&](int rank, const std::string& text) {
    missing += (missing.empty() ? "rank " : "; rank ") + std::to_string(rank) + text;
    first = first < 0 ? rank : first;
  };
  // A rank that also finds the group broken says so; one that failed left its words. Who does neither is missing.
  const auto ask = [&](int rank) {
    const auto failed = s.failure_key(at_step, rank);
    while (!s.store->check({here + std::to_string(rank)})) {
      const bool has_words = s.store->check({failed});
      if (has_words || std::chrono::steady_clock::now() > deadline) {
        add(rank, has_words ? " failed: " + as_text(s.store->get(failed))
                            : " did not come (it left its loop, died or hangs)");
        return;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    const auto [ms, elsewhere] = as_wait(as_text(s.store->get(here + std::to_string(rank))));
    latest.add(rank, ms);
    if (elsewhere != waiting_for) {
      add(rank, " waits for " + elsewhere + ", this one for " + waiting_for +
                    " (one of them left its loop)");
    }
  };
  try {
    if (s.store) {
      s.store->set(here + std::to_string(s.rank), as_bytes(waited, waiting_for));
      s.store->set(s.key + "broken", as_bytes(waiting_for));
    }
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
               "the store is gone too (the rank that serves it died)";
  }
  detail::throw_rank_failed(
      first, at_step,
      missing.find(kMemoryPrefix) == std::string::npos ? Status::error : Status::out_of_memory,
      "the process group broke in step " + std::to_string(at_step) + ": " +
          (missing.empty() ? "no rank is missing" : missing) + " (cause: " + cause + ")");
}

}  // namespace brimful
