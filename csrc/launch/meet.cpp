// Ranks meet through the store, not by a collective: that can tell who is missing, needs no device, and an error on one
// rank leaves no collective half done.
#include "launch/meet.h"

#include <brimful/error.h>
#include <brimful/step/oom.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <optional>
#include <vector>

namespace brimful::launch {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using std::chrono::milliseconds;

constexpr milliseconds kReadPatience{2000};  // with ranks that have come, and only read
constexpr char kFine = '=';
constexpr char kError = 'e';
constexpr char kOutOfMemory = 'm';

struct Failure {
  int rank;
  FailureKind kind;
  std::string text;
};

milliseconds timeout_of(const Group& group) {
  try {
    return group->getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const c10::Error&) {  // a backend without options
    return group->getStore()->getTimeout();
  }
}

/// One meeting. Every rank counts its own, so that they agree on the number without a word.
class Meeting {
 public:
  explicit Meeting(const Group& group)
      : store_(group->getStore()), rank_(group->getRank()), world_size_(group->getSize()) {
    number_ = store_->add(kPrefix + "count/" + std::to_string(rank_), 1);
  }

  void come(const std::string& word) { store_->set(key(rank_), word); }

  /// @throws RankFailed that names who did not come
  void wait_for_all(milliseconds timeout, const std::string& what) {
    try {
      store_->wait(keys(""), timeout);
    } catch (const std::exception& e) {
      throw_missing(timeout, what, describe(std::current_exception()));
    }
  }

  std::optional<Failure> first_failure() {
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto word = rank == rank_ ? std::string(1, kFine) : store_->get_to_str(key(rank));
      if (word.front() != kFine) {
        const bool memory = word.front() == kOutOfMemory;
        return Failure{rank, memory ? FailureKind::out_of_memory : FailureKind::error,
                       word.substr(1)};
      }
    }
    return std::nullopt;
  }

  /// Rank 0 may serve the store and end: it lets the others read first.
  void leave() {
    store_->set(key(rank_, "read/"), std::string(1, kFine));
    if (rank_ == 0) {
      try {
        store_->wait(keys("read/"), kReadPatience);
      } catch (const std::exception&) {  // a rank died after it had come: the next collective tells
      }
    }
    if (number_ > 1) {  // all have left the meeting before this one
      --number_;
      store_->deleteKey(key(rank_));
      store_->deleteKey(key(rank_, "read/"));
    }
  }

 private:
  std::string key(int rank, const char* kind = "") const {
    return kPrefix + std::to_string(number_) + "/" + kind + std::to_string(rank);
  }
  std::vector<std::string> keys(const char* kind) const {
    std::vector<std::string> result;
    for (int rank = 0; rank < world_size_; ++rank) {
      result.push_back(key(rank, kind));
    }
    return result;
  }

  [[noreturn]] void throw_missing(milliseconds timeout, const std::string& what,
                                  const std::string& cause) {
    std::string missing;
    int first = -1;
    try {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (!store_->check({key(rank)})) {
          missing += (first < 0 ? "rank " : ", rank ") + std::to_string(rank);
          first = first < 0 ? rank : first;
        }
      }
    } catch (const std::exception&) {
      missing = "the rank that serves the store";
    }
    throw RankFailed(
        first, -1, FailureKind::error,
        "not all ranks came to " + what + " (missing: " + missing +
            "; timeout_ms: " + std::to_string(timeout.count()) +
            "): they left their loop, died or hang; look at their output (cause: " + cause + ")");
  }

  inline static const std::string kPrefix = "brimful/meet/";
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_size_;
  int64_t number_;
};

std::string word_of(const std::exception_ptr& error) {
  if (!error) {
    return {kFine};
  }
  return (is_out_of_memory(error) ? kOutOfMemory : kError) + describe(error);
}

}  // namespace

void meet(const Group& group, const std::string& what, const std::exception_ptr& error) {
  std::optional<Failure> failure;
  if (group && group->getSize() > 1) {
    TORCH_CHECK_VALUE(group->getStore(),
                      "the process group has no store to meet through (backend: ",
                      group->getBackendName(), "); make it with a store");
    try {
      const auto timeout = timeout_of(group);
      Meeting meeting(group);
      meeting.come(word_of(error));
      meeting.wait_for_all(timeout, what);
      failure = meeting.first_failure();
      meeting.leave();
    } catch (const std::exception&) {
      if (!error) {
        throw;
      }
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
  if (failure) {
    detail::throw_rank_failed(
        failure->rank, -1, failure->kind,
        "rank " + std::to_string(failure->rank) + " could not " + what + ": " + failure->text);
  }
}

}  // namespace brimful::launch
