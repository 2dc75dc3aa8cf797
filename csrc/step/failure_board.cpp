#include "step/failure_board.h"

#include <brimful/log.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

namespace brimful {
namespace {
constexpr const char* kGivenUp = "given_up";
// A step has three at most, and ranks are in the same step, or in the next one.
constexpr size_t kPostsThatStay = 8;

/// On a thread that no rank waits for.
template <typename Work>
auto ask_aside(Work work) {
  std::packaged_task<decltype(work())()> task(std::move(work));
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  return answer;
}

template <typename Work>
auto ask(std::chrono::milliseconds patience, Work work) {
  auto answer = ask_aside(std::move(work));
  if (answer.wait_for(patience) != std::future_status::ready) {
    throw std::runtime_error("the store did not answer in " + std::to_string(patience.count()) +
                             " ms");
  }
  return answer.get();
}

Failure read(c10d::Store& store, const std::string& key) {
  Failure unreadable;
  unreadable.text = "(its message cannot be read; see that rank's own output)";
  return decode_failure(store.get(key)).value_or(unreadable);
}
}  // namespace

FailureBoard::FailureBoard(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
    : store_(std::move(store)), prefix_(std::move(prefix)) {}

std::string FailureBoard::place_of(int64_t step, int rank) {
  return "failed/" + std::to_string(step) + "/" + std::to_string(rank);
}

void FailureBoard::post(const std::string& place, const Failure& failure, Patience patience) const {
  if (!store_) {
    return;
  }
  ask(patience, [store = store_, key = prefix_ + place, bytes = encode(failure),
                 old = outdated(prefix_ + place)] {
    store->compareSet(key, {}, bytes);
    try {
      for (const auto& other : old) {
        store->deleteKey(other);
      }
    } catch (const std::exception&) {  // a store that keeps all
    }
    return true;
  });
}

std::vector<std::string> FailureBoard::outdated(const std::string& place) const {
  const std::lock_guard lock(posted_mutex_);
  std::vector<std::string> old;
  if (std::find(posted_.begin(), posted_.end(), place) == posted_.end()) {
    posted_.push_back(place);
  }
  while (posted_.size() > kPostsThatStay) {
    old.push_back(std::move(posted_.front()));
    posted_.pop_front();
  }
  return old;
}

std::optional<Failure> FailureBoard::find(const std::string& place, Patience patience) const {
  if (!store_) {
    return std::nullopt;
  }
  return ask(patience, [store = store_, key = prefix_ + place]() -> std::optional<Failure> {
    if (!store->check({key})) {
      return std::nullopt;
    }
    return read(*store, key);
  });
}

void FailureBoard::try_post(const std::string& place, const Failure& failure) const {
  try {
    post(place, failure);
  } catch (const std::exception& e) {
    log(LogLevel::warning,
        std::string("could not post this rank's failure for the other ranks: ") + e.what());
  }
}

std::optional<Failure> FailureBoard::find_other(int64_t step, int own_rank, int world_size) const {
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      auto failure = rank == own_rank ? std::nullopt : find(place_of(step, rank));
      if (failure) {
        return failure;
      }
    }
  } catch (const std::exception&) {  // the store's rank died
  }
  return std::nullopt;
}

Failure FailureBoard::await(const std::string& place, Patience patience) const {
  Failure missing;
  if (!store_) {
    missing.text = "(its process group has no store to read its message from)";
    return missing;
  }
  try {
    return ask(patience + kAnswerPatience, [store = store_, key = prefix_ + place, patience] {
      store->wait({key}, patience);
      return read(*store, key);
    });
  } catch (const std::exception&) {
    missing.text = "(its message did not arrive; see that rank's own output)";
    return missing;
  }
}

void FailureBoard::give_up(const Failure& why, Patience patience) const {
  if (!store_) {
    return;
  }
  auto answer = ask_aside(
      [store = store_, key = prefix_ + kGivenUp, bytes = encode(why)] { store->set(key, bytes); });
  if (answer.wait_for(patience) == std::future_status::ready) {
    answer.get();
  }
}

bool FailureBoard::given_up(Patience patience, Patience pause) {
  if (!store_) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  try {
    if (!question_.valid()) {
      const auto now = std::chrono::steady_clock::now();
      if (now - asked_at_ < pause) {
        return false;
      }
      asked_at_ = now;
      question_ =
          ask_aside([store = store_, key = prefix_ + kGivenUp] { return store->check({key}); });
    }
    return question_.wait_for(patience) == std::future_status::ready && question_.get();
  } catch (const std::exception&) {
    return false;  // the store's rank died: the group's own timeout ends the wait
  }
}

}  // namespace brimful
