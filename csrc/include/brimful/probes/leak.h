#pragma once
#include <brimful/export.h>
#include <brimful/memory/live_table.h>

#include <cstdint>
#include <string>
#include <vector>

/// Memory that grows from step to step: which lines made it, what holds it, and what to do. Pure functions on plain
/// data; from any thread.
namespace brimful::probes {

/// What holds a tensor, by the last container on the way to it.
enum class HolderKind : uint8_t {
  unknown,  ///< nothing that could be named: a C++ object, or a way too long
  variable,
  attribute,
  sequence,
  mapping,
  closure,
  lru_cache,
  hook,
  traceback,
  cycle,
  notebook
};
BRIMFUL_API const char* name_of(HolderKind kind);

/// Who keeps blocks alive, in the names of the program.
struct Holder {
  HolderKind kind = HolderKind::unknown;
  std::string path;       ///< from a root to the tensor: "losses[11]", "self.meter.sum"
  std::string container;  ///< the same up to what grows: "losses", "self.meter.sum"
  std::string root;       ///< what the path begins in: "global of train", "local of main()"
  int64_t length = -1;    ///< of the container; -1 where it has none
  bool bounded =
      false;  ///< the container stops growing by itself: deque(maxlen=...), lru_cache(maxsize=...)
  std::string
      node;  ///< the graph's node through which it is held; empty if it is the tensor itself
  bool scalar = false;       ///< the tensor on the path has one element
  bool has_graph = false;    ///< the tensor on the path has a graph behind it
  bool is_gradient = false;  ///< the path ends in a gradient that has a graph itself
  bool numpy = false;        ///< through a NumPy array that shares the tensor's memory
  bool linked =
      false;  ///< by a chain of which each link holds the one before; it begins at `container`
  const void* data = nullptr;  ///< the first byte of the storage of the path's tensor
};

struct GrowthOptions {
  int64_t steps = 5;    ///< so many steps, one after the other, have left something behind
  int64_t warm_up = 2;  ///< the first steps do not count: caches, optimizer state
};

/// A line whose blocks pile up.
struct Growth {
  uint32_t site = 0;
  int64_t first_step = 0;  ///< of those that left something behind, in one run up to the last
  int64_t steps = 0;       ///< of the run that left something behind
  int64_t period = 1;      ///< the most steps from one of them to the next
  int64_t all_steps = 0;   ///< those before the run as well
  bool slowing = false;  ///< the later half of all took half as long again as the first, or longer
  int64_t blocks = 0;
  int64_t bytes = 0;
};

/// The lines that have left blocks behind in `steps` complete steps, the largest first: in each of the last, or at
/// intervals of which none is twice as long as another. The step under way (`step`) and the one before, whose loss or
/// output may rightly still be held, do not count.
/// @throws c10::ValueError unless options.steps >= 2 and options.warm_up >= 0
BRIMFUL_API std::vector<Growth> growing(const std::vector<memory::LiveBlock>& blocks, int64_t step,
                                        const GrowthOptions& options = {});

/// One cause of growth.
struct Leak {
  Holder holder;
  /// "train.py:31 (main)": the line that made the holder's tensor, then those that grow, the most bytes first.
  std::vector<std::string> sites;
  int64_t steps = 0;  ///< whose memory is held
  int64_t bytes = 0;
  int64_t bytes_per_step = 0;
  bool evaluation = false;  ///< there is no gradient: the loop does not train
  bool retained = false;    ///< a backward() has kept its graph: retain_graph=True
  bool filling =
      false;  ///< no graph is kept, and not for long: a cache that is not full looks the same
  bool copied =
      false;  ///< all of it is made anew each time that it grows (torch.cat([history, new]))
};

/// What to change in the program, in one clause: "use total += loss.item()".
BRIMFUL_API std::string advice(const Leak& leak);
/// "`total` (train.py:31) keeps 5 graphs alive through AddBackward0, 1.2 MiB a step; use total += loss.item()"
BRIMFUL_API std::string to_string(const Leak& leak);

}  // namespace brimful::probes
