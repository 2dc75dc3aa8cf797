#pragma once
#include <brimful/export.h>
#include <brimful/probes/leak.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace brimful::probes {

class CopiedSites;
struct CopiedGrowth;

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
  /// keeps every graph's nodes alive, which no allocator sees after backward() has freed what they saved: `sums` shows it.
  /// @throws c10::ValueError for bad options
  explicit LeakFinder(GrowthOptions options = {}, Search search = nullptr, Sums sums = nullptr);

  /// Between two steps: looks for lines that grow and have not been judged, and returns the leaks that are new. What is
  /// in a container that stops growing by itself is none, nor is a line that lets go of what it held (a window of the last
  /// tensors); what has no holder is one after twice as many steps. What keeps no graph may be a cache that fills: it is
  /// `filling` until five times as many steps have left something at the same rate, and returned again then. What is
  /// copied whole into a larger block, `steps` times, is a leak as well (`copied`): for that it follows operators in the steps
  /// that may decide it, of all threads.
  /// @throws c10::Error if tracking is off
  std::vector<Leak> check();
  /// Those of `check` that grow still, or are sure.
  const std::vector<Leak>& leaks() const { return leaks_; }
  /// Follows no operator until the next `check`; so does the end of the finder.
  void rest();

 private:
  struct Suspects;
  bool lets_go(const Growth& growth, int64_t last) const;
  bool is_ripe(const Growth& growth) const;
  bool is_sure(const Holder& holder, const Growth& growth) const;
  void forget_full(const Suspects& suspects);
  struct Judged;
  void judge_copies(const CopiedGrowth& copies, std::span<const Holder> holders, Judged& judged);
  void add(const Growth& growth, const Holder& holder, Judged& judged, bool copied);
  std::vector<Leak> judge(const Suspects& suspects);
  std::vector<Leak> settle(std::map<std::string, Leak>&& by_holder);
  std::vector<Leak> judge_sums(const std::vector<memory::LiveBlock>& blocks);

  GrowthOptions options_;
  Search search_;
  Sums sums_;
  struct Run {
    int64_t length = 0;
    int64_t steps = 0;  // in which it grew, at even intervals
    int64_t grown = 0;  // the newest of them
    int64_t least = 0;  // interval
    int64_t most = 0;
  };
  static Run next_run(Run run, int64_t length, int64_t check);
  int64_t checks_ = 0;
  std::map<std::string, Run> runs_;
  struct Seen {
    int64_t steps = 0;    // that have left something
    int64_t last = -1;    // the newest step that was looked at
    int64_t let_go = -1;  // the newest at which one of them was gone
  };
  std::map<uint32_t, Seen> seen_;                      // by site
  std::set<uint32_t> judged_;                          // sites
  std::map<uint32_t, std::set<std::string>> filling_;  // holders, by site
  std::set<std::string> announced_;                    // holders
  std::set<std::string> hinted_;                       // holders that may be filling
  std::vector<Leak> leaks_;
  std::shared_ptr<CopiedSites> copies_;
};

}  // namespace brimful::probes
