#pragma once
#include <brimful/error.h>

#include <chrono>

namespace brimful {

/// Work of an attempt before its pieces, which has collectives of its own: a rank that fails makes those that are left, so that
/// no other waits for it.
class Prologue {
 public:
  Prologue() = default;
  Prologue(const Prologue&) = delete;
  Prologue& operator=(const Prologue&) = delete;
  virtual ~Prologue() = default;
  /// Returns false where another rank has failed: then no piece runs.
  virtual bool run() = 0;
  /// The others know of this attempt: this rank cannot repeat it alone.
  virtual bool has_met() const = 0;
  /// Makes the collectives that run() has not made. `verdict`: this rank's.
  virtual void leave(Status verdict) = 0;
  /// How long run() has waited for other ranks.
  virtual std::chrono::steady_clock::duration waited() const = 0;
};

}  // namespace brimful
