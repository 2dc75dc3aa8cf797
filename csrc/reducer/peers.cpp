// Words between ranks, through the process group's store: why a rank failed, and who is missing when a group breaks.
#include <brimful/log.h>

#include <chrono>
#include <thread>

#include "reducer/at_exit.h"
#include "reducer/reducer_state.h"

namespace brimful {
namespace {
constexpr int64_t kMissingPatience = 2000;  // ms
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
  std::vector<std::function<void()>> all;
};
Releases& releases() {
  static auto* instance = new Releases;
  return *instance;
}
}  // namespace

void release_at_exit(std::function<void()> release) {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  releases().all.push_back(std::move(release));
}

void release_groups() {
  const std::lock_guard<std::mutex> lock(releases().mutex);
  for (const auto& release : releases().all) {
    release();
  }
  releases().all.clear();
}

std::string Reducer::State::failure_key(int64_t at_step, int of_rank) const {
  return key + "failed/" + std::to_string(at_step) + "/" + std::to_string(of_rank);
}

void Reducer::publish_failure(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  if (!s.store) {
    return;
  }
  const auto words = (kind == FailureKind::out_of_memory ? kMemoryPrefix : "") + text;
  try {
    // The first words stay: later ones know less.
    s.store->compareSet(s.failure_key(s.step, s.rank), {}, as_bytes(words));
  } catch (const std::exception& e) {
    log(LogLevel::warning,
        std::string("could not leave word of a failure for the other ranks: ") + e.what());
  }
}

std::string Reducer::read_failure(int rank, int64_t patience_ms) {
  auto& s = *s_;
  if (!s.store) {
    return "(its process group has no store to read its words from)";
  }
  const auto key = s.failure_key(s.step - 1, rank);
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
  try {
    s.group->abort();
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("could not abort the process group: ") + e.what());
  }
  wait_for_buckets();
  end_attempt();
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

void Reducer::throw_broken(int64_t at_step, const std::string& waiting_for,
                           const std::string& cause) {
  auto& s = *s_;
  const auto here = s.key + "broken/";
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(kMissingPatience);
  std::string missing;
  int first = -1;
  // A rank that also finds the group broken says so; one that failed left its words. Who does neither is missing.
  const auto ask = [&](int rank) {
    const auto failed = s.failure_key(at_step, rank);
    while (!s.store->check({here + std::to_string(rank)})) {
      const bool has_words = s.store->check({failed});
      if (has_words || std::chrono::steady_clock::now() > deadline) {
        missing += (missing.empty() ? "rank " : "; rank ") + std::to_string(rank) +
                   (has_words ? " failed: " + as_text(s.store->get(failed))
                              : " did not come (it left its loop, died or hangs)");
        first = first < 0 ? rank : first;
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const auto elsewhere = as_text(s.store->get(here + std::to_string(rank)));
    if (elsewhere != waiting_for) {
      missing += (missing.empty() ? "rank " : "; rank ") + std::to_string(rank) + " waits for " +
                 elsewhere + ", this one for " + waiting_for + " (one of them left its loop)";
      first = first < 0 ? rank : first;
    }
  };
  try {
    if (s.store) {
      s.store->set(here + std::to_string(s.rank), as_bytes(waiting_for));
    }
    for (int rank = 0; s.store && rank < s.world_size; ++rank) {
      if (rank != s.rank) {
        ask(rank);
      }
    }
  } catch (const std::exception&) {
    missing += std::string(missing.empty() ? "" : "; ") +
               "the store is gone too (the rank that serves it died)";
  }
  detail::throw_rank_failed(
      first, at_step,
      missing.find(kMemoryPrefix) == std::string::npos ? FailureKind::error
                                                       : FailureKind::out_of_memory,
      "the process group broke in step " + std::to_string(at_step) + ": " +
          (missing.empty() ? "no rank is missing" : missing) + " (cause: " + cause + ")");
}

}  // namespace brimful
