#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace brimful::launch {

/// A thread that says in the store that this process lives, and watches what others say. It needs neither the GIL nor a
/// collective. Thread-safe.
class Pulse {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// `store` is the thread's alone.
  Pulse(c10::intrusive_ptr<c10d::Store> store, int64_t id, Milliseconds heartbeat,
        Milliseconds dead_after);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  /// From now on also these.
  void watch(const std::vector<int64_t>& ids);
  /// From now on request_regroup() is called where a process wants to join the group with this number; earlier requests are
  /// forgotten.
  void watch_joins(int64_t epoch);
  /// The process has left, or has said nothing for `dead_after` while this one did look.
  bool is_dead(int64_t id) const;
  /// The process has left, and said so.
  bool has_left(int64_t id) const;
  /// The store has not answered for as long.
  bool is_lost() const;
  /// Says that this process has left, and ends the thread.
  void leave() noexcept;

  /// The key at which those who want to join the next group are counted.
  static std::string joins_key(int64_t epoch) { return "joins/" + std::to_string(epoch); }

 private:
  struct Watched {
    std::string said;
    double silent_ms = 0;  ///< seen by this process, which may have been stopped itself
    bool left = false;
  };
  void run();
  void beat();
  void look(double passed_ms);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int64_t id_;
  const Milliseconds heartbeat_;
  const Milliseconds dead_after_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool ends_ = false;
  bool lost_ = false;
  int64_t beats_ = 0;
  int64_t joins_epoch_ = 0;
  std::map<int64_t, Watched> others_;
  std::thread thread_;
};

}  // namespace brimful::launch
