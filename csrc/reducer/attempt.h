#pragma once
#include <cstdint>
#include <mutex>

namespace brimful {

/// A reducer's part of a step, and the backward that runs in it. Hooks run on one autograd thread per device: they hold
/// lock(), and so does who changes the attempt while a backward may run.
class Attempt {
 public:
  using Lock = std::unique_lock<std::mutex>;
  [[nodiscard]] Lock lock() { return Lock(mutex_); }

  // How it goes on.
  /// A StepGroup drives it. `buffer_source`: the rank whose buffers win.
  void begin_managed(int buffer_source) {
    mode_ = Mode::managed;
    of_loop_ = false;
    buffer_source_ = buffer_source;
  }
  /// A plain loop drives it.
  void begin_plain(int buffer_source) {
    of_loop_ = true;
    buffer_source_ = buffer_source;
  }
  /// The backward of a plain loop is about to run.
  void enter_plain_backward() { mode_ = Mode::plain; }
  /// Buckets may be launched in the backward that begins, or not.
  void begin_backward(bool launches) { launches_ = launches; }
  /// Backward is over; what it did not bring is filled in.
  void complete() { completes_ = true; }
  /// No backward runs any more. What was launched is still waited for.
  void leave() {
    mode_ = Mode::idle;
    launches_ = false;
  }
  void end() {
    leave();
    completes_ = false;
    ++step_;
  }
  /// The attempt that ended was no step.
  void take_back() { --step_; }
  void go_on_at(int64_t step) { step_ = step; }
  /// Ranks may be without data, from now on or no more.
  void set_uneven(bool uneven) { uneven_ = uneven; }

  // What it has come to.
  int64_t step() const { return step_; }
  bool is_idle() const { return mode_ == Mode::idle; }
  bool is_managed() const { return mode_ == Mode::managed; }
  /// A backward of a plain loop runs, whether it ends a step or not.
  bool is_plain() const { return mode_ == Mode::plain; }
  /// A plain loop's step runs.
  bool is_plain_step() const { return is_plain() && launches_; }
  /// The last step that began is one of a plain loop.
  bool is_of_loop() const { return of_loop_; }
  bool launches() const { return launches_; }
  /// Gradients that come now are the step's last ones.
  bool is_last_backward() const { return launches_ || completes_; }
  bool is_uneven() const { return uneven_; }
  int buffer_source() const { return buffer_source_; }

 private:
  enum class Mode : uint8_t { idle, plain, managed };

  std::mutex mutex_;
  int64_t step_ = 0;
  Mode mode_ = Mode::idle;
  bool of_loop_ = false;
  bool launches_ = false;
  bool completes_ = false;
  bool uneven_ = false;
  int buffer_source_ = 0;
};

}  // namespace brimful
