// Ranks meet through the store, not by a collective: that can say who is missing, needs no device, and an error on one
// rank leaves no collective half done.
#include "launch/meet.h"

#include <brimful/step/oom.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "step/failure_board.h"

namespace brimful::launch {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using std::chrono::milliseconds;

constexpr milliseconds kReadPatience{2000};  // with ranks that have come, and only read

milliseconds timeout_of(const Group& group) {
  try {
    return group->getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const c10::Error&) {  // a backend without options
    return group->getStore()->getTimeout();
  }
}

/// One meeting. Every rank counts its own, so that they agree on the number without a message.
class Meeting {
 public:
  /// Meetings of different `purpose` are counted apart. `what`: is to be done.
  Meeting(const Group& group, const std::string& purpose, std::string what)
      : prefix_("brimful/" + purpose + "/"),
        store_(group->getStore()),
        board_(store_, prefix_),
        what_(std::move(what)),
        timeout_(timeout_of(group)),
        rank_(group->getRank()),
        world_size_(group->getSize()) {
    number_ = store_->add(prefix_ + "count/" + std::to_string(rank_), 1);
  }

  /// Of kind ok where it is none.
  void come(Failure own) {
    own.rank = rank_;
    board_.post(place(rank_), own, timeout_);
  }

  /// @throws RankFailed that names who did not come
  void wait_for_all() {
    try {
      store_->wait(keys(""), timeout_);
    } catch (const std::exception&) {
      throw_missing(to_string(std::current_exception()));
    }
  }

  /// Of the other ranks, the lowest first.
  std::vector<Failure> failures() {
    std::vector<Failure> failures;
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto end = rank == rank_ ? std::nullopt : board_.find(place(rank), timeout_);
      if (end && is_failure(end->kind)) {
        failures.push_back(*end);
      }
    }
    return failures;
  }

  /// Leaves without having read; what the others said before stays in the store.
  void leave_early() {
    store_->set(key(rank_, "read/"), std::string("read"));
    let_others_read();
  }

  void leave() {
    store_->set(key(rank_, "read/"), std::string("read"));
    let_others_read();
    if (number_ > 1) {  // all have left the meeting before this one
      --number_;
      store_->deleteKey(key(rank_));
      store_->deleteKey(key(rank_, "read/"));
    }
  }

 private:
  /// Rank 0 may serve the store and end: it lets the others read first.
  void let_others_read() {
    if (rank_ == 0) {
      try {
        store_->wait(keys("read/"), kReadPatience);
      } catch (const std::exception&) {  // a rank died after it had come: the next collective fails
      }
    }
  }

  std::string place(int rank, const char* kind = "") const {
    return std::to_string(number_) + "/" + kind + std::to_string(rank);
  }
  std::string key(int rank, const char* kind = "") const { return prefix_ + place(rank, kind); }
  std::vector<std::string> keys(const char* kind) const {
    std::vector<std::string> result;
    result.reserve(static_cast<size_t>(world_size_));
    for (int rank = 0; rank < world_size_; ++rank) {
      result.push_back(key(rank, kind));
    }
    return result;
  }

  [[noreturn]] void throw_missing(const std::string& cause) {
    std::string missing;
    int first = -1;
    try {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (!board_.find(place(rank))) {
          missing += (first < 0 ? "rank " : ", rank ") + std::to_string(rank);
          first = first < 0 ? rank : first;
        }
      }
    } catch (const std::exception&) {
      missing = "the rank that serves the store";
    }
    throw RankFailed(
        first, -1, Status::error,
        "not all ranks came to " + what_ + " (missing: " + missing +
            "; timeout_ms: " + std::to_string(timeout_.count()) +
            "): they left their loop, died or hang; look at their output (cause: " + cause + ")");
  }

  std::string prefix_;
  c10::intrusive_ptr<c10d::Store> store_;
  FailureBoard board_;
  std::string what_;
  milliseconds timeout_;
  int rank_;
  int world_size_;
  int64_t number_;
};

void require_store(const Group& group) {
  TORCH_CHECK_VALUE(group->getStore(), "the process group has no store to meet through (backend: ",
                    group->getBackendName(), "); make it with a store");
}

Failure end_of(Status kind, std::string text) {
  Failure end;
  end.kind = kind;
  end.text = std::move(text);
  return end;
}

[[noreturn]] void throw_failure(const Failure& failure, const std::string& what) {
  detail::throw_rank_failed(
      failure.rank, -1, failure.kind,
      "rank " + std::to_string(failure.rank) + " could not " + what + ": " + failure.text);
}

}  // namespace

void meet(const Group& group, const std::string& what, const std::exception_ptr& error) {
  std::optional<Failure> failure;
  if (group && group->getSize() > 1) {
    require_store(group);
    try {
      Meeting meeting(group, "meet", what);
      meeting.come(error ? failure_of(error) : end_of(Status::ok, ""));
      meeting.wait_for_all();
      const auto failures = meeting.failures();
      meeting.leave();
      if (!failures.empty()) {
        failure = failures.front();
      }
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
    throw_failure(*failure, what);
  }
}

bool share_attempt(const Group& group, const std::string& what, Status end,
                   const std::string& text) {
  if (!group || group->getSize() == 1) {
    return end == Status::out_of_memory;
  }
  require_store(group);
  std::vector<Failure> failures;
  try {
    Meeting meeting(group, "attempt", what);
    meeting.come(end_of(end, text));
    if (end == Status::error) {
      meeting.leave_early();
      return false;
    }
    meeting.wait_for_all();
    failures = meeting.failures();
    meeting.leave();
  } catch (const RankFailed&) {
    throw;
  } catch (const std::exception&) {
    if (end == Status::error) {
      return false;
    }
    throw RankFailed(-1, -1, Status::error,
                     "the ranks lost their store when they were to " + what +
                         ": the rank that serves it has ended; look at its output (cause: " +
                         to_string(std::current_exception()) + ")");
  }
  const auto failed = std::find_if(failures.begin(), failures.end(), [](const Failure& failure) {
    return failure.kind == Status::error;
  });
  if (failed != failures.end()) {
    throw_failure(*failed, what);
  }
  return end == Status::out_of_memory || !failures.empty();
}

}  // namespace brimful::launch
