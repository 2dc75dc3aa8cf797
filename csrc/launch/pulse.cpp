#include "launch/pulse.h"

#include <brimful/log.h>
#include <brimful/step/oom.h>
#include <brimful/step/stop.h>

#include <algorithm>
#include <utility>

#include "base/block_sigpipe.h"

namespace brimful::launch {
namespace {
constexpr const char* kLeft = "left";

std::string beat_key(int64_t id) {
  return "beat/" + std::to_string(id);
}
}  // namespace

Pulse::Pulse(c10::intrusive_ptr<c10d::Store> store, int64_t id, Milliseconds heartbeat,
             Milliseconds dead_after)
    : store_(std::move(store)), id_(id), heartbeat_(heartbeat), dead_after_(dead_after) {
  beat();  // before anyone looks for it
  const BlockSigpipe inherited;
  thread_ = std::thread([this] { run(); });
}

Pulse::~Pulse() {
  leave();
}

void Pulse::watch(const std::vector<int64_t>& ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto id : ids) {
    if (id != id_) {
      others_.try_emplace(id);
    }
  }
}

void Pulse::watch_joins(int64_t epoch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  joins_epoch_ = epoch;
  clear_regroup();  // of those who are in it now
}

bool Pulse::is_dead(int64_t id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = others_.find(id);
  return found != others_.end() &&
         (found->second.left ||
          found->second.silent_ms >= static_cast<double>(dead_after_.count()));
}

bool Pulse::has_left(int64_t id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = others_.find(id);
  return found != others_.end() && found->second.left;
}

bool Pulse::is_lost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

void Pulse::beat() {
  store_->set(beat_key(id_), std::to_string(++beats_));
}

void Pulse::look(double passed_ms) {
  std::vector<int64_t> ids;
  std::vector<std::string> keys;
  int64_t epoch = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, watched] : others_) {
      ids.push_back(id);
      keys.push_back(beat_key(id));
    }
    epoch = joins_epoch_;
  }
  const auto said = keys.empty() ? std::vector<std::vector<uint8_t>>{} : store_->multiGet(keys);
  const bool joins = epoch > 0 && store_->check({joins_key(epoch)});
  const std::lock_guard<std::mutex> lock(mutex_);
  if (joins && epoch == joins_epoch_) {
    request_regroup();
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    auto& watched = others_[ids[i]];
    const std::string now(said[i].begin(), said[i].end());
    watched.silent_ms = now == watched.said ? watched.silent_ms + passed_ms : 0;
    watched.left = now == kLeft;
    watched.said = now;
  }
}

void Pulse::run() {
  using Clock = std::chrono::steady_clock;
  auto last = Clock::now();
  auto answered = last;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ends_) {
    lock.unlock();
    const auto now = Clock::now();
    // This process may have been stopped: the others were not silent because it did not look.
    const auto passed = std::min<Clock::duration>(now - std::exchange(last, now), 2 * heartbeat_);
    bool lost = false;
    try {
      beat();
      look(std::chrono::duration<double, std::milli>(passed).count());
      answered = Clock::now();
    } catch (const std::exception& e) {
      lost = Clock::now() - answered >= dead_after_;
      if (lost) {
        log(LogLevel::warning,
            std::string("the store of the ranks is gone, and no new group can be formed: ") +
                e.what());
      }
    }
    lock.lock();
    lost_ = lost_ || lost;
    if (lost) {
      return;
    }
    wake_.wait_for(lock, heartbeat_, [&] { return ends_; });
  }
}

void Pulse::leave() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
    try {
      store_->set(beat_key(id_), std::string(kLeft));
    } catch (const std::exception&) {  // it is gone: no process asks
    }
  }
}

}  // namespace brimful::launch
