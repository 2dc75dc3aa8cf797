#include "support/catch.h"

#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule_text.h>
#include <c10/util/Exception.h>

#include "pipeline/mutations.h"
#include "pipeline/reference_executor.h"

namespace test_checker_fuzz {

using namespace brimful::pipeline;
using brimful::test::Ending;
using brimful::test::mutate;
using brimful::test::Random;
using brimful::test::random_schedule;
using brimful::test::ReferenceExecutor;

namespace {
Ending ending_of(const Schedule& schedule, const CheckOptions& options) {
  const auto ending = ReferenceExecutor(schedule, options).run();
  const bool completes = ending == Ending::complete && options.channel_capacity;
  if (!completes || has_communication(schedule) || schedule.stages < 1 ||
      schedule.microbatches < 1) {
    return ending;
  }
  return ReferenceExecutor(with_communication(schedule), options).run();
}

std::string describe(const Schedule& schedule, const CheckOptions& options) {
  return schedule.name + ", capacity " +
         (options.channel_capacity ? std::to_string(*options.channel_capacity) : "any") +
         " of kind " + std::to_string(static_cast<int>(options.channels)) + ", " +
         std::to_string(schedule.stages) + " stages, " + std::to_string(schedule.microbatches) +
         " microbatches:\n" + to_csv(schedule);
}
}  // namespace

TEST_CASE("The checker's verdict on mutated schedules is what an executor does", "[pipeline]") {
  Random random(2401);
  int fine = 0;
  int stuck = 0;
  int failed = 0;
  for (int round = 0; round < 10'000; ++round) {
    auto schedule = random_schedule(random, 4, 5);
    const bool keeps_all = random.below(4) > 0;
    for (int times = random.below(4); times > 0; --times) {
      mutate(schedule, keeps_all, random);
    }
    CheckOptions options;
    if (const int capacity = random.below(5); capacity < 4) {
      options.channel_capacity = capacity;
    }
    options.channels = static_cast<ChannelKind>(random.below(3));
    const auto result = check(schedule, options);
    const bool has_work = schedule.stages > 0 &&
                          schedule.microbatches > 0;  // else it ends at once, with nothing done
    const auto ending = has_work ? ending_of(schedule, options) : Ending::failed;
    const bool agrees = result.ok()               ? ending == Ending::complete
                        : result.problems.empty() ? ending == Ending::stuck
                                                  : ending != Ending::complete;
    if (!agrees) {
      FAIL("the checker says '" << result.to_string() << "', the executor ends with "
                                << static_cast<int>(ending) << "\n"
                                << describe(schedule, options));
    }
    ++(result.ok() ? fine : result.problems.empty() ? stuck : failed);
  }
  INFO(fine << " valid, " << stuck << " deadlocks, " << failed << " others");
  CHECK(fine > 2000);
  CHECK(stuck > 500);
  CHECK(failed > 2000);
}

}  // namespace test_checker_fuzz
