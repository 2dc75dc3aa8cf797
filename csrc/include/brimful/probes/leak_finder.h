#pragma once
#include <brimful/export.h>
#include <brimful/probes/leak.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace brimful::probes {

/// Finds memory that grows from step to step, in the live tables of all devices (memory/live_table.h; tracking must be on).
/// One thread at a time. Costs a pass over the live blocks a step, and more only once for each line that grows.
class BRIMFUL_API LeakFinder {
 public:
  /// Who holds the storages that begin at `data`, in their order.
  using Search = std::function<std::vector<Holder>(const std::vector<const void*>& data)>;

  /// A variable that is a sum of sums, and of how many.
  struct Sum {
    Holder holder;
    int64_t length = 0;
  };
  /// All there are; asked at every check.
  using Sums = std::function<std::vector<Sum>()>;

  /// Without a search (C++ programs) a leak has its lines and its growth, and no holder. A sum that grows by each step
  /// keeps every graph's nodes alive, which no allocator sees after backward() has freed what they saved: `sums` tells.
  /// @throws c10::ValueError for bad options
  explicit LeakFinder(GrowthOptions options = {}, Search search = nullptr, Sums sums = nullptr);

  /// Between two steps: looks for lines that grow and have not been judged, and returns the leaks that are new. What is
  /// in a container that stops growing by itself is none; what has no holder is one after twice as many steps.
  /// @throws c10::Error if tracking is off
  std::vector<Leak> check();
  const std::vector<Leak>& leaks() const { return leaks_; }

 private:
  struct Suspects;
  std::vector<Leak> judge(const Suspects& suspects);
  std::vector<Leak> judge_sums(const std::vector<memory::LiveBlock>& blocks);

  GrowthOptions options_;
  Search search_;
  Sums sums_;
  struct Run {
    int64_t length = 0;
    int64_t steps = 0;  // in which it grew, one after the other
  };
  std::map<std::string, Run> runs_;
  std::set<uint32_t> judged_;        // sites
  std::set<std::string> announced_;  // holders
  std::vector<Leak> leaks_;
};

}  // namespace brimful::probes
