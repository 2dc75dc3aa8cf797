#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "reducer/engine.h"

namespace brimful {

/// Uneven data in a plain loop, between begin() and end(): ranks may be without data.
class UnevenData {
 public:
  explicit UnevenData(Engine& engine) : engine_(engine) {}
  /// As PlainLoop::begin_join().
  void begin(bool mean_of_active, bool throw_early);
  void end();
  /// In the place of one whose reducer took another group.
  void go_on_from(const UnevenData& before) { begin(before.mean_of_active_, before.throw_early_); }

  /// True if it is on any rank. A collective.
  /// @throws RankFailed if the process group broke
  bool any_rank(bool own, const std::string& what);
  /// Before a forward, where the ranks ask each other then: how many have data if others have left, else 0.
  int64_t remaining(bool has_data);
  /// The same of a step that stands.
  int64_t note_data(const std::vector<ControlRecord>& records);
  [[noreturn]] void throw_ended(int64_t with_data) const;

  /// This rank has come to a step, with data or without.
  void meet();
  /// Until all ranks have come.
  void wait_for_all();
  void forget_meeting() { met_.reset(); }

  /// Ranks that had data in the last step, in order.
  const std::vector<int>& active() const { return active_; }
  /// The gradients are the mean over as many ranks.
  double averaged_over() const;
  /// The rank whose buffers win.
  int source() const { return active_.empty() ? 0 : active_.front(); }

 private:
  std::vector<uint8_t> ask_all(bool own, const std::string& what);
  int64_t left_early(int64_t with_data) const;

  Engine& engine_;
  bool mean_of_active_ = false;  ///< gradients are the mean over those
  bool throw_early_ = false;     ///< a step without all ranks fails
  std::vector<int> active_;
  c10::intrusive_ptr<c10d::Work> met_;  ///< all ranks have made their forward
};

}  // namespace brimful
