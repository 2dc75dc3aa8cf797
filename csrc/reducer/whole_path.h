#pragma once
#include <brimful/export.h>

#include <utility>

namespace brimful {

/// While it lives, a reducer that this thread makes lets a single rank make its collectives too. For measurements and tests.
class BRIMFUL_API WholePath {
 public:
  explicit WholePath(bool on = true) : before_(std::exchange(is_on(), on)) {}
  ~WholePath() { is_on() = before_; }
  WholePath(const WholePath&) = delete;
  WholePath& operator=(const WholePath&) = delete;
  /// Of this thread.
  static bool& is_on();

 private:
  bool before_;
};

}  // namespace brimful
