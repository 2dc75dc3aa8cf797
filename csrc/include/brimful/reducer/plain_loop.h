#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/failure.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brimful {

/// A reducer in a plain loop, which no step drives: a step begins with the module's forward, its backward makes gradients
/// the mean over the ranks, as with torch's DDP, and a failure of another rank is raised from backward(). Lives as long as
/// its reducer. Not thread-safe, but hooks may run on any autograd thread.
class BRIMFUL_API PlainLoop {
 public:
  virtual ~PlainLoop() = default;
  /// Before the module's forward: settles a step that failed on this rank, so that the other ranks learn of it.
  /// @throws c10::Error if a later reducer has taken over a parameter
  virtual void prepare_forward() = 0;
  /// After it, for each output that needs a gradient: its backward is the beginning of the step's backward.
  virtual void watch(const at::Tensor& output) = 0;
  virtual void forward_done() = 0;
  /// False: gradients only accumulate, as under no_sync(). Read when backward runs.
  virtual void set_sync(bool sync) = 0;
  virtual bool sync() const = 0;

  /// Until end_scope_ok() or end_scope_failed() a failure of this rank is announced by the latter, which knows its text.
  virtual void begin_scope() = 0;
  virtual void end_scope_ok() = 0;
  virtual void end_scope_failed(FailureKind kind, const std::string& text) = 0;
  /// Announces that this rank cannot do its part of the step: launches what it owes, waits at most `patience_ms`.
  virtual void announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) = 0;
  /// For the other ranks, whose step fails with this one's.
  virtual void publish_failure(FailureKind kind, const std::string& text) = 0;
  /// True while the other ranks wait, or may come to wait, for a step that this rank has begun.
  virtual bool owes() const = 0;

  /// Uneven data, between begin_join() and end_join(). A rank without more data calls join_step() instead of its steps: it
  /// makes the step's calls, with nothing to add, and leaves its gradients empty, or with `keep_gradients` gets the others'
  /// mean. Returns false once no rank makes steps. `mean_of_active`: gradients are the mean over the ranks that have data,
  /// not over all of them. `throw_early`: ranks ask each other before every forward (require_data), and raise on all of
  /// them as soon as one has left.
  /// @throws RankFailed or RankOutOfMemory if another rank fails its step; c10::Error of require_data
  virtual void begin_join(bool mean_of_active, bool throw_early) = 0;
  virtual bool join_step(bool keep_gradients = false) = 0;
  virtual void end_join() = 0;
  /// Under begin_join() with `throw_early`, before a forward: a collective of a byte. Does nothing otherwise, and under a
  /// sizer, whose ranks need not leave together.
  /// @throws c10::Error on every rank if a rank has left and another has not
  virtual void require_data() = 0;
  /// True on all ranks if `own` is on any. A collective.
  virtual bool any_rank(bool own) = 0;
  /// All ranks know that the step is not made: the scope that is open has no failure to announce.
  virtual void call_off() = 0;
  /// Ranks that had data in the last step, in order; empty before the first one.
  virtual const std::vector<int>& active() const = 0;
  /// A rank was asked to stop (step/stop.h), and all do after the last step that they made.
  virtual bool stop() const = 0;
};

}  // namespace brimful
