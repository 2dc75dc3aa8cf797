// One line of the log for each repeated attempt, whatever the kind of work.
#include "step/repetition.h"
#include "support/catch.h"

#include <string>
#include <vector>

namespace test_repetition {

using namespace brimful;

namespace {
struct Case {
  Repetition repetition;
  int64_t garbage_bytes;
  bool cache_released;
  std::string line;
};
}  // namespace

TEST_CASE("Steps, mappings and pipelines say alike what is repeated, and how", "[step]") {
  const std::vector<Case> cases = {
      {{.rank = 1, .what = "step 157", .rows = 512, .pieces = 3, .more = 7},
       0,
       false,
       "rank 1 ran out of memory in step 157: a batch of 512 is repeated in 7 pieces instead of 3"},
      {{.what = "map_batches", .rows = 8, .pieces = 1, .more = 2},
       0,
       false,
       "rank 0 ran out of memory in map_batches: a batch of 8 is repeated in 2 pieces instead of "
       "1"},
      {{.rank = 2,
        .what = "step 3",
        .where = "forward of microbatch 1 in stage 2",
        .rows = 16,
        .pieces = 4,
        .more = 8,
        .unit = "microbatches"},
       0,
       false,
       "rank 2 ran out of memory in step 3, in the forward of microbatch 1 in stage 2: a batch of "
       "16 "
       "is repeated in 8 microbatches instead of 4"},
      {{.what = "step 3", .as_it_was = true},
       int64_t{3} << 20,
       false,
       "rank 0 ran out of memory in step 3: 3.0 MiB of garbage in reference cycles is freed, and "
       "it "
       "is repeated as it was"},
      {{.what = "step 3", .as_it_was = true},
       0,
       true,
       "rank 0 ran out of memory in step 3: the bytes were there, in torch's cache, which is "
       "released, and it is repeated as it was"},
      {{.what = "step 3", .as_it_was = true},
       0,
       false,
       "rank 0 ran out of memory in step 3: it is repeated as it was"},
      {{.what = "step 3", .reason = "memory ran out, and a piece cannot be smaller"},
       0,
       false,
       "rank 0, step 3: memory ran out, and a piece cannot be smaller"},
  };
  for (const auto& [repetition, garbage_bytes, cache_released, line] : cases) {
    AttemptNote failed;
    failed.garbage_bytes = garbage_bytes;
    failed.cache_released = cache_released;
    CHECK(to_string(repetition, failed) == line);
  }
}

}  // namespace test_repetition
