#include "sharded/size_exchange.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/block_sigpipe.h"

namespace brimful {
namespace {
using Bytes = std::vector<uint8_t>;
constexpr std::chrono::hours kLong{24};
constexpr std::chrono::seconds kPatience{2};
constexpr std::chrono::microseconds kFirstPause{100};
constexpr std::chrono::microseconds kLongestPause{5000};

Bytes bytes_of(const CallSizes& numbers) {
  Bytes bytes(numbers.size() * sizeof(int64_t));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
  }
  return bytes;
}

CallSizes numbers_of(const Bytes& bytes) {
  CallSizes numbers(bytes.size() / sizeof(int64_t));
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(int64_t));
  }
  return numbers;
}
}  // namespace

struct SizeExchange::Shared {
  Shared(c10::intrusive_ptr<c10d::Store> asks, c10::intrusive_ptr<c10d::Store> waits,
         std::string keys, int of)
      : store(std::move(asks)), waiting(std::move(waits)), prefix(std::move(keys)), rank(of) {}

  c10::intrusive_ptr<c10d::Store> store;    ///< of whoever asks
  c10::intrusive_ptr<c10d::Store> waiting;  ///< the thread's
  std::string prefix;
  int rank;
  IssuedSizes own;
  std::set<std::pair<int64_t, int>> asked;  ///< of this rank, by attempt
  std::vector<std::string> shown;           ///< keys of the last attempt
  std::promise<void> over;

  std::string place(const char* what, int of, int64_t number) const {
    return prefix + what + std::to_string(of) + "/" + std::to_string(number);
  }
  std::string place_of(int of, int64_t attempt, int64_t index) const {
    return place("size/", of, attempt) + "/" + std::to_string(index);
  }
  std::string end_of(int of, int64_t attempt) const { return place("end/", of, attempt); }

  /// This rank asks that one.
  void wake(int of, int64_t attempt) {
    const auto number = store->add(prefix + "asked/" + std::to_string(of), 1) - 1;
    store->set(place("wake/", of, number), bytes_of({attempt}));
  }
  void show(const std::string& key, const CallSizes& numbers) {
    waiting->set(key, bytes_of(numbers));
    shown.push_back(key);
  }
  void show_all(int64_t attempt);
  void forget_shown();
  /// However long it takes.
  /// @throws std::exception if the store is gone
  void wait_for(const std::string& key) const;
  /// Until it is stopped.
  /// @throws std::exception if the store is gone: then a rank is, too, and the connections of the hosts show it
  void answer();
};

void SizeExchange::Shared::forget_shown() {
  for (const auto& key : std::exchange(shown, {})) {
    try {
      waiting->deleteKey(key);
    } catch (const std::exception&) {  // a store that keeps all
    }
  }
}

void SizeExchange::Shared::show_all(int64_t attempt) {
  for (size_t nth = 0; const auto known = own.wait_for(attempt, nth); ++nth) {
    show(place_of(rank, attempt, known->index), known->sizes);
  }
  if (const auto end = own.end_of(attempt); end >= 0) {
    show(end_of(rank, attempt), {end});
  }
}

void SizeExchange::Shared::wait_for(const std::string& key) const {
  while (true) {
    const auto since = std::chrono::steady_clock::now();
    try {
      waiting->wait({key}, kLong);
      return;
    } catch (const std::exception&) {
      if (std::chrono::steady_clock::now() - since < kLong) {
        throw;
      }
    }
  }
}

void SizeExchange::Shared::answer() {
  int64_t last = -1;
  for (int64_t number = 0;; ++number) {
    const auto key = place("wake/", rank, number);
    wait_for(key);
    if (own.is_stopped()) {
      return;
    }
    const auto attempt = numbers_of(waiting->get(key)).at(0);
    waiting->deleteKey(key);
    if (attempt > last) {  // else it is shown to whoever asked first
      forget_shown();
      show_all(attempt);
      last = attempt;
    }
  }
}

SizeExchange::SizeExchange(const c10::intrusive_ptr<c10d::Store>& store, std::string prefix,
                           int rank)
    : shared_(std::make_shared<Shared>(store, store ? store->clone() : nullptr, std::move(prefix),
                                       rank)) {
  if (!store) {
    shared_->over.set_value();
    return;
  }
  const BlockSigpipe inherited;
  std::thread([shared = shared_] {
    try {
      shared->answer();
    } catch (const std::exception&) {  // the store is gone
    }
    shared->waiting.reset();
    shared->over.set_value();
  }).detach();
}

SizeExchange::~SizeExchange() {
  shared_->own.stop();
  auto over = shared_->over.get_future();
  if (over.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    return;
  }
  const BlockSigpipe inherited;
  std::thread([shared = shared_] {  // whose server may have stopped
    try {
      shared->wake(shared->rank, -1);
    } catch (const std::exception&) {  // it has ended
    }
  })
      .detach();
  over.wait_for(kPatience);
}

IssuedSizes& SizeExchange::own() {
  return shared_->own;
}

std::optional<CallSizes> SizeExchange::ask(int rank, int64_t attempt, int64_t index,
                                           const std::function<void()>& check) {
  auto& s = *shared_;
  TORCH_CHECK(s.store, "the group has no store in which ranks could ask for sizes");
  if (s.asked.emplace(attempt, rank).second) {
    s.asked.erase(s.asked.begin(), s.asked.lower_bound({attempt, 0}));
    s.wake(rank, attempt);
  }
  const auto sizes_at = s.place_of(rank, attempt, index);
  const auto end_at = s.end_of(rank, attempt);
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const bool ended = s.store->check({end_at});  // what was begun is shown before it
    if (s.store->check({sizes_at})) {
      return numbers_of(s.store->get(sizes_at));
    }
    if (ended) {
      return std::nullopt;
    }
    check();
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace brimful
