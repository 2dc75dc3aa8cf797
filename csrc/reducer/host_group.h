#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "reducer/agree.h"

namespace brimful {

/// A round of an exchange in which every rank's bytes go to all ranks. Each keeps a list of blocks, its own first: it sends
/// the first ones, and puts those that come at its end.
struct HostRound {
  int to = 0;
  int from = 0;
  int64_t begin = 0;   ///< of those that come
  int64_t blocks = 0;  ///< sent, and gotten
};
/// log2(world_size) of them, rounded up. After the last one, block i is that of the i-th rank after this one, around the ring.
std::vector<HostRound> rounds_of(int rank, int world_size);

/// The hosts of a process group's ranks, on connections of their own besides those of its device. A thread makes the
/// exchanges, one after the other: a rank that has left its step still passes on what the others wait for. What comes in the
/// next exchange is asked for when the last one has ended: gloo sends nothing that is not asked for, so that each round
/// would take a message back first.
class HostGroup {
 public:
  /// Who is informed. Neither throws.
  struct Watch {
    std::function<void()> leaves;  ///< this host is about to close its connections, as it should
    std::function<void()>
        lost;  ///< by the thread: a connection has ended, which was not aborted here
    std::function<void()>
        overdue;  ///< by the thread: sums of the group's device have not ended in time
  };
  /// `backend`: sends and receives between the ranks, for this object alone. `bytes`: of each rank in an exchange. `timeout`:
  /// for a message of another rank.
  HostGroup(c10::intrusive_ptr<c10d::Backend> backend, int64_t bytes,
            std::chrono::milliseconds timeout, Watch watch = {});
  /// What is under way has failed then.
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  /// Begins after the exchanges that were begun before, in the same order on all ranks. From any thread; does not wait.
  Exchange begin(const std::vector<uint8_t>& own);
  /// Sums of the group's device, for which whoever waits shall not wait for ever.
  void expect(c10::intrusive_ptr<c10d::Work> sums);
  /// What is under way, and what is begun later, fails; the other ranks' with it.
  void abort();
  /// No exchange has failed, and none was aborted.
  bool is_whole() const;

 private:
  class Running;

  using Messages = std::vector<c10::intrusive_ptr<c10d::Work>>;

  struct Expected {
    c10::intrusive_ptr<c10d::Work> sums;
    std::chrono::steady_clock::time_point since;
  };

  void run();
  /// Until there is an exchange to make.
  void wait_for_next();
  /// @throws std::runtime_error if sums have not ended in time
  void look_at_sums();
  void run_next(uint64_t number);
  /// What comes in this exchange.
  void ask(uint64_t number);
  void make_rounds(const Running& running, uint64_t number);
  void wait(const Messages& messages, size_t index);
  /// Of this exchange, by the thread that listens.
  void wait_for_first(uint64_t number);
  /// Waits for the first message of each exchange, also between them: gloo says that a connection has ended only to who
  /// waits for a message of it, and closes one whose message is late.
  void listen();
  void fail(std::exception_ptr error);
  void require_whole() const;

  c10::intrusive_ptr<c10d::Backend> backend_;  ///< the thread's
  int rank_;
  int world_size_;
  int64_t bytes_;
  std::vector<HostRound> rounds_;
  std::array<at::Tensor, 2> lists_;  ///< of blocks; exchanges take turns
  std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<Running>> queue_;
  std::array<Messages, 2> coming_;  ///< by round
  Messages sent_;                   ///< of the exchange that runs
  std::exception_ptr error_;        ///< the first one
  std::deque<Expected> expected_;   ///< oldest first
  bool aborted_ = false;            ///< by abort()
  Watch watch_;
  struct Firsts {
    uint64_t asked = 0;  ///< exchanges whose messages may come
    uint64_t come = 0;   ///< exchanges whose first message has come
  };
  Firsts firsts_;
  std::thread thread_;
  std::thread listener_;  ///< where a host that is lost is watched for
};

}  // namespace brimful
