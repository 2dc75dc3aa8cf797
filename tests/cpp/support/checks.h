#pragma once
#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace brimful::test {

/// Catch2's assertions are for one thread only. Ranks collect here what went wrong; the test then requires that
/// failures() is empty.
class Checks {
 public:
  void expect(bool holds, const std::string& what) {
    if (!holds) {
      const std::lock_guard lock(mutex_);
      failures_.push_back(what);
    }
  }
  std::vector<std::string> failures() const {
    const std::lock_guard lock(mutex_);
    return {failures_.begin(), failures_.begin() + std::min<size_t>(failures_.size(), 12)};
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> failures_;
};

}  // namespace brimful::test
