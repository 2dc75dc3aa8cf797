#include <brimful/probes/loader_advice.h>
#include <c10/util/Exception.h>
#include <string>
#include "support/catch.h"

namespace test_loader_advice {

using namespace brimful::probes;

namespace {

LoaderFacts facts(double wait_ms, double work_ms, int64_t workers, double cpus) {
  LoaderFacts given;
  given.steps = 20;
  given.wait_ms = wait_ms;
  given.work_ms = work_ms;
  given.num_workers = workers;
  given.cpus = cpus;
  if (workers > 0) {
    given.prefetch_factor = 2;
  }
  return given;
}

std::string words(const LoaderAdvice& advice) {
  std::string all;
  for (const auto& reason : advice.reasons) {
    all += reason + "\n";
  }
  return all;
}

}  // namespace

TEST_CASE("Workers follow from what a batch and a step take", "[probes]") {
  const auto advice = advise_loader(facts(40, 10, 0, 16));
  CHECK(advice.wait_share == Approx(0.8));
  CHECK(advice.num_workers == 4);
  CHECK(advice.prefetch_factor == 2);
  CHECK_THAT(words(advice), Catch::Contains("80 % of the time is spent waiting"));
  // Two workers that give a batch every 20 ms take 40 ms for one.
  CHECK(advise_loader(facts(10, 10, 2, 16)).num_workers == 4);
}

TEST_CASE("A loop that hardly waits has nothing to gain", "[probes]") {
  const auto advice = advise_loader(facts(0.1, 50, 2, 16));
  CHECK(advice.num_workers == 2);
  CHECK(advice.prefetch_factor == 2);
  CHECK_THAT(words(advice), Catch::Contains("nothing to gain"));
  CHECK(advise_loader(facts(0.1, 50, 0, 16)).num_workers == 0);
}

TEST_CASE("Advice stays within the CPUs that may be used", "[probes]") {
  auto given = facts(400, 10, 0, 8);
  auto advice = advise_loader(given);
  CHECK(advice.num_workers == 7);
  CHECK_THAT(words(advice), Catch::Contains("would take 40 workers, and there are 8 usable CPUs"));
  given.processes = 4;
  CHECK(advise_loader(given).num_workers == 1);
  CHECK_THAT(words(advise_loader(given)), Catch::Contains("shared by 4 ranks"));
  given.cpus = 0.5;
  CHECK(advise_loader(given).num_workers == 1);
  CHECK(advise_loader(facts(0, 50, 12, 4)).num_workers == 3);  // no gain, and in training's way
}

TEST_CASE("Four workers a GPU is only where nothing was measured", "[probes]") {
  auto given = facts(40, 1, 0, 64);
  given.steps = 4;
  CHECK(advise_loader(given).num_workers == 4);
  CHECK_THAT(words(advise_loader(given)), Catch::Contains("too few steps were measured (4)"));
  given.cpus = 3;
  CHECK(advise_loader(given).num_workers == 2);
  given.steps = 5;
  given.cpus = 64;
  CHECK(advise_loader(given).num_workers == 40);
}

TEST_CASE("Enough workers that are late at times get a longer queue", "[probes]") {
  auto given = facts(1, 10, 4, 16);
  given.late_steps = 2;  // of 20
  CHECK(advise_loader(given).num_workers == 4);
  CHECK(advise_loader(given).prefetch_factor == 4);
  given.late_steps = 5;  // four workers that began together are late once in four steps
  CHECK(advise_loader(given).num_workers == 5);
  CHECK(advise_loader(given).prefetch_factor == 2);
}

TEST_CASE("Pinned memory is for copies to a GPU that take time", "[probes]") {
  auto given = facts(0, 10, 2, 8);
  CHECK_FALSE(advise_loader(given).pin_memory);
  given.cuda = true;
  CHECK(advise_loader(given).pin_memory);
  given.copy_ms = 0.1;
  CHECK_FALSE(advise_loader(given).pin_memory);
  given.copy_ms = 2;
  CHECK(advise_loader(given).pin_memory);
}

TEST_CASE("Workers that start anew each epoch should stay", "[probes]") {
  auto given = facts(0, 10, 2, 8);
  given.epochs = 3;
  CHECK_FALSE(advise_loader(given).persistent_workers);
  given.first_wait_ms = 900;
  CHECK(advise_loader(given).persistent_workers);
  given.num_workers = 0;
  CHECK_FALSE(advise_loader(given).persistent_workers);
}

TEST_CASE("A worker whose private memory grows is reported", "[probes]") {
  auto given = facts(0, 10, 2, 8);
  given.worker_growth_bytes = int64_t{8} << 20;
  CHECK_THAT(words(advise_loader(given)), !Catch::Contains("private memory"));
  given.worker_growth_bytes = int64_t{200} << 20;
  CHECK_THAT(words(advise_loader(given)), Catch::Contains("private memory grew by 200.0 MiB"));
}

TEST_CASE("Facts that cannot be are refused", "[probes]") {
  CHECK_THROWS_AS(advise_loader(facts(-1, 1, 0, 1)), c10::ValueError);
  CHECK_THROWS_AS(advise_loader(facts(1, 1, -1, 1)), c10::ValueError);
  CHECK_THROWS_AS(advise_loader(facts(1, 1, 0, 0)), c10::ValueError);
  const auto idle = advise_loader(facts(0, 0, 0, 1));
  CHECK(idle.wait_share == 0);
  CHECK(advise_loader(facts(5, 0, 0, 8)).num_workers == 7);
}

}  // namespace test_loader_advice
