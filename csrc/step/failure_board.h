#pragma once
#include <brimful/step/failure.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// Where the ranks of a group post their failures, and read those of others: in the group's store. Its server may
/// be a process that is stopped and never answers, so the store is asked on threads of their own, and a call waits for its
/// answer no longer than for `patience`. A group may have no store: then nothing is left and nothing known.
/// Thread-safe.
class FailureBoard {
 public:
  using Patience = std::chrono::milliseconds;
  static constexpr Patience kAnswerPatience{2000};

  /// `prefix`: of the keys in the store, the same on all ranks.
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, std::string prefix);

  /// Where a rank posts its failure in a step.
  static std::string place_of(int64_t step, int rank);
  /// Posts. The first one at a place stays: later ones know less. What this process has posted before the last few times is
  /// taken away: a rank has read it, or makes no further step.
  /// @throws std::exception if the store is gone or does not answer
  void post(const std::string& place, const Failure& failure,
            Patience patience = kAnswerPatience) const;
  void post(const Failure& failure) const { post(place_of(failure.step, failure.rank), failure); }
  /// As post(); if that fails, only the log says so.
  void try_post(const std::string& place, const Failure& failure) const;
  void try_post(const Failure& failure) const {
    try_post(place_of(failure.step, failure.rank), failure);
  }
  /// What lies there now.
  /// @throws std::exception if the store is gone or does not answer
  std::optional<Failure> find(const std::string& place, Patience patience = kAnswerPatience) const;
  /// Of the lowest other rank that has posted a failure in this step; nothing if the store is gone.
  std::optional<Failure> find_other(int64_t step, int own_rank, int world_size) const;
  /// What lies there within `patience` of the store's answer; else a failure that says that it did not arrive.
  Failure await(const std::string& place, Patience patience) const;

  /// Ends the waits of all who ask given_up().
  /// @throws std::exception if the store is gone
  void give_up(const Failure& why, Patience patience = kAnswerPatience) const;
  /// Whether a rank has given up. An answer that comes later is a later call's. The store is asked anew at the earliest
  /// `pause` after the last time. False if it is gone.
  bool given_up(Patience patience, Patience pause = Patience(0));

 private:
  /// Those of this process's places whose time is over, with this one the newest.
  std::vector<std::string> outdated(const std::string& place) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  mutable std::mutex posted_mutex_;
  mutable std::deque<std::string> posted_;
  std::mutex mutex_;
  std::future<bool> question_;
  std::chrono::steady_clock::time_point asked_at_;
};

}  // namespace brimful
