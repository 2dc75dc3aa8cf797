#pragma once
#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pipeline/executor/random_state.h"

namespace brimful::pipeline {

enum class DrawPart : uint8_t { forward, backward, weight };

/// Ranks of a process share the CPU's default generator, and those on one device the device's. Actions that draw from one
/// take turns with it, each from a seed of its own: of the caller's generator, stage, microbatch and part. So what they draw
/// does not depend on the threads, and a checkpoint in one stage may put the generator back without disturbing another.
///
/// Who draws is found out. While none has, a generator that has moved at the end of an action is noticed: not at the run's end
/// alone, since a checkpoint may have put it back. Then the step is run again with turns for all, and each is compared. After that those take turns that have drawn, or have
/// computed activations anew in a backward; the others are watched, and one that begins to draw has the step run again.
class Turns {
 public:
  /// `devices`: by rank of this process. `cancelled` ends the wait for a turn, and outlives this.
  Turns(const std::vector<c10::Device>& devices, const std::atomic<bool>& cancelled);

  /// Around a run, by the thread that calls it. Before it nothing is under way.
  void begin();
  void resize(int stages) { touches_.resize(stages); }
  /// A stage whose backwards compute activations anew, before the run in which they do first.
  void expect_backward(int stage) { touches_[stage][1] = true; }
  /// `complete`: all actions have run. Returns whether they must run again, since stages have drawn beside each other; the
  /// generators are then as before, else their next numbers are others if an action has drawn.
  bool end(bool complete);
  /// Turns that are under way change no generator any more.
  void abandon() { abandoned_ = true; }
  /// Whether ranks' threads need a DrawWatch.
  bool watches() const { return mode_ != Mode::silent; }

  /// A rank's generators have moved though no action was known to draw: the run will have to be repeated.
  bool drew_together(int rank);

  class Turn;

 private:
  enum class Mode : uint8_t { silent, learning, known };
  struct Generator {
    explicit Generator(c10::Device on) : device(on) {}
    c10::Device device;
    std::mutex turn;
    RandomState callers;
    uint64_t seed = 0;
    bool draws = false;              ///< an action has, in a step that showed it
    std::atomic<bool> drew = false;  ///< in this run
  };
  using Generators = std::vector<Generator*>;

  void look(int rank);

  Mode mode_ = Mode::silent;
  const std::atomic<bool>& cancelled_;
  std::vector<std::unique_ptr<Generator>> generators_;
  std::vector<Generators> of_rank_;
  std::vector<std::array<bool, 2>> touches_;  ///< by stage: its forwards, its backwards
  std::atomic<bool> surprised_ = false;
  std::atomic<bool> moved_ = false;  ///< a generator, while silent
  std::atomic<bool> abandoned_ = false;
};

/// An action's, on its rank's thread, from when its messages are there.
class Turns::Turn {
 public:
  /// @throws Cancelled
  Turn(Turns& turns, int rank, int stage, DrawPart part, int microbatch);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  struct Held {
    Generator* generator;
    std::unique_lock<std::mutex> lock;
    RandomState before;
    RandomState seeded;
  };
  bool must_take(const Generator& generator) const;
  void take(Generator& generator, int microbatch);
  void end(Held& held);

  Turns& turns_;
  int rank_;
  int stage_;
  DrawPart part_;
  uint64_t sequence_ = 0;
  std::vector<Held> held_;
};

}  // namespace brimful::pipeline
