// The message of BatchTooLarge: every fact is in it, and only advice that can help.
#include "step/too_large.h"
#include "support/catch.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace test_too_large {

using namespace brimful;

namespace {
constexpr int64_t kMiB = int64_t{1} << 20;

/// Eight rows on the CPU, split to the end; 40 MiB of a 64 MiB limit are the work's.
Shortfall example() {
  Shortfall shortfall;
  shortfall.rank = 1;
  shortfall.world_size = 1;
  shortfall.rows = 8;
  shortfall.max_retries = 8;
  const auto attempt = [](int64_t pieces, int64_t mib) {
    AttemptNote note;
    note.pieces = pieces;
    note.piece_rows = 8 / pieces;
    note.peak_bytes = mib * kMiB;
    return note;
  };
  shortfall.attempts = {attempt(1, 62), attempt(2, 61), attempt(4, 60), attempt(8, 60)};
  StandingBytes standing;
  standing.parameters = 6 * kMiB;
  standing.float32 = 6 * kMiB;
  standing.trainable = 4 * kMiB;
  standing.gradients = 2 * kMiB;
  standing.optimizer_state = 8 * kMiB;
  standing.buffers = 1 * kMiB;
  shortfall.standing = standing;
  shortfall.used_bytes = 20 * kMiB;
  shortfall.limit_bytes = 64 * kMiB;
  shortfall.others = {100 * kMiB, 500 * kMiB, 1000 * kMiB, "/proc/meminfo"};
  shortfall.last_error = "CPU out of memory.";
  return shortfall;
}

/// The advice by how it begins.
std::vector<std::string> kinds(const Shortfall& shortfall) {
  auto advice = advice_for(shortfall);
  for (auto& line : advice) {
    line = line.substr(0, line.find(' ', line.find(' ') + 1));
  }
  return advice;
}

using Kinds = std::vector<std::string>;
}  // namespace

TEST_CASE("The error that no split fits says what is known", "[sizer][too large]") {
  const auto shortfall = example();
  const auto facts = facts_of(shortfall);
  CHECK(to_string(shortfall, facts) ==
        "no split of the batch fits on rank 1 of 1 (device: cpu, rows: 8, retries: 3, max_retries: "
        "8).\n"
        "Tried: 1 piece of 8 rows (peak: 62.0 MiB); 2 pieces of 4 rows (peak: 61.0 MiB); 4 pieces "
        "of 2 rows (peak: 60.0 MiB); 8 pieces of 1 row (peak: 60.0 MiB).\n"
        "The last peak: parameters 6.0 MiB, gradients 2.0 MiB, optimizer state 8.0 MiB, buffers "
        "1.0 MiB, other tensors 3.0 MiB, activations and temporaries 40.0 MiB (limit: 64.0 MiB).\n"
        "Outside this process's tensors: this process 100.0 MiB, others 500.0 MiB, free 1000.0 MiB "
        "(source: "
        "/proc/meminfo).\n"
        "Try next: 1. raise the memory limit (memory.set_limit, now: 64.0 MiB, free beyond it: "
        "956.0 MiB); 2. checkpoint activations (torch.utils.checkpoint; activations and "
        "temporaries: 40.0 MiB); 3. compute in bfloat16 (autocast in the loss function); 4. freeze "
        "parameters that need no training (gradients: 4.0 MiB, optimizer state: 8.0 MiB); 5. use a "
        "smaller model or input, or a device with more memory.\n"
        "The last error was: CPU out of memory.");
  int64_t sum = 0;
  for (const auto& [name, bytes] : facts.bytes) {
    sum += bytes;
  }
  CHECK(sum == facts.tried.back().peak_bytes);
  CHECK(facts.rank == 1);
  CHECK(facts.device == "cpu");
  CHECK(facts.limit_bytes == 64 * kMiB);
}

TEST_CASE("What is not known is left out", "[sizer][too large]") {
  auto shortfall = example();
  shortfall.standing.reset();
  shortfall.limit_bytes.reset();
  shortfall.others = {};
  const auto facts = facts_of(shortfall);
  CHECK(facts.held.empty());
  REQUIRE(facts.bytes.size() == 2);
  CHECK(facts.bytes[0] == std::pair<std::string, int64_t>("other tensors", 20 * kMiB));
  const auto words = to_string(shortfall, facts);
  CHECK(words.find("Outside this process's tensors") == std::string::npos);
  CHECK(words.find("limit") == std::string::npos);
  shortfall = example();
  shortfall.standing->trainable = 6 * kMiB;
  shortfall.standing->optimizer_state.reset();
  CHECK(to_string(shortfall, facts_of(shortfall)).find("optimizer state: not known") !=
        std::string::npos);
  CHECK_NOTHROW(to_string({}, facts_of({})));
}

TEST_CASE("An optimizer without room has the same facts, and other advice", "[sizer][too large]") {
  auto shortfall = example();
  shortfall.of = Shortfall::Of::optimizer;
  shortfall.attempts.clear();
  shortfall.last_error.clear();
  shortfall.standing->gradients = 0;
  shortfall.optimizer_bytes = 50 * kMiB;
  const auto facts = facts_of(shortfall);
  CHECK(
      to_string(shortfall, facts) ==
      "the optimizer's step would run out of memory, whatever the split, on rank 1 of 1 (device: "
      "cpu, rows: 8).\n"
      "The peak would be: parameters 6.0 MiB, gradients 0 B, optimizer state 8.0 MiB, buffers 1.0 "
      "MiB, other tensors 5.0 MiB, the optimizer's step 50.0 MiB (limit: 64.0 MiB).\n"
      "Outside this process's tensors: this process 100.0 MiB, others 500.0 MiB, free 1000.0 MiB "
      "(source: "
      "/proc/meminfo).\n"
      "Try next: 1. raise the memory limit (memory.set_limit, now: 64.0 MiB, free beyond it: "
      "956.0 MiB); 2. take an optimizer with less state; 3. freeze parameters that need no "
      "training (gradients: 4.0 MiB, optimizer state: 8.0 MiB); 4. use a smaller model or input, "
      "or a device with more memory");
  CHECK(facts.tried.empty());
  shortfall.world_size = 2;
  CHECK(kinds(shortfall) ==
        Kinds{"raise the", "take an", "freeze parameters", "shard the", "use a"});
}

TEST_CASE("A mapping that does not fit is reported without what is for training",
          "[sizer][too large]") {
  auto shortfall = example();
  shortfall.of = Shortfall::Of::mapping;
  shortfall.trains = false;
  shortfall.rows_done = 3;
  const auto words = to_string(shortfall, facts_of(shortfall));
  CHECK(
      words.rfind("a piece of one row does not fit on rank 1 of 1 (device: cpu, rows: 8, done: 3, "
                  "retries: 3, max_retries: 8).\nTried: 1 piece of 8 rows",
                  0) == 0);
  CHECK(kinds(shortfall) == Kinds{"raise the", "compute in", "use a"});
  shortfall.attempts.resize(2);
  CHECK(to_string(shortfall, facts_of(shortfall)).rfind("no piece that was tried fits on", 0) == 0);
  CHECK(kinds(shortfall) == Kinds{"raise max_retries,", "raise the", "compute in", "use a"});
}

TEST_CASE("Only advice that applies is given", "[sizer][too large]") {
  const Kinds rest{"checkpoint activations", "compute in", "freeze parameters", "use a"};
  const auto with = [&](Kinds first, const Kinds& then) {
    first.insert(first.end(), then.begin(), then.end());
    return first;
  };
  auto shortfall = example();
  CHECK(kinds(shortfall) == with({"raise the"}, rest));

  SECTION("a limit above which nothing is free, or none at all") {
    shortfall.others.free_bytes = 44 * kMiB;  // what the limit leaves
    CHECK(kinds(shortfall) == rest);
    shortfall.others.free_bytes = 44 * kMiB + 1;
    CHECK(kinds(shortfall) == with({"raise the"}, rest));
    shortfall.others.free_bytes.reset();
    CHECK(kinds(shortfall) == with({"raise the"}, rest));
    shortfall.limit_bytes.reset();
    shortfall.others.others_bytes = 5 * kMiB;
    CHECK(kinds(shortfall) == rest);
  }
  SECTION("others' memory matters where no limit does") {
    shortfall.limit_bytes.reset();
    CHECK(kinds(shortfall) == with({"free what"}, rest));
  }
  SECTION("retries that are used up, lockstep") {
    shortfall.attempts.resize(2);
    CHECK(kinds(shortfall) == with({"raise max_retries,", "raise the"}, rest));
    CHECK(advice_for(shortfall)[0] == "raise max_retries, or begin with more pieces (pieces=4)");
    shortfall.of = Shortfall::Of::lockstep;
    CHECK(kinds(shortfall) == with({"begin with", "raise the"}, rest));
    CHECK(to_string(shortfall, facts_of(shortfall)).rfind("in lockstep no rank may split", 0) == 0);
  }
  SECTION("fragments") {
    shortfall.fragmented = true;
    CHECK(kinds(shortfall) ==
          with({"raise the", "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True:"}, rest));
  }
  SECTION("the ladder's end") {
    shortfall.climbed = true;
    CHECK(kinds(shortfall) ==
          Kinds{"raise the", "split the", "compute in", "freeze parameters", "use a"});
  }
  SECTION("a ladder that was left out") {
    shortfall.ladder_off = true;
    CHECK(kinds(shortfall) ==
          Kinds{"raise the", "let the", "compute in", "freeze parameters", "use a"});
    CHECK(advice_for(shortfall)[1] ==
          "let the ladder recompute and offload what one row saves (ladder=[..., \"recompute\", "
          "\"offload\"]; activations and temporaries: 40.0 MiB)");
    shortfall.attempts.resize(2);  // rows can be split first
    CHECK(kinds(shortfall) == with({"raise max_retries,", "raise the"}, rest));
  }
  SECTION("a ladder without a disk") {
    shortfall.attempts.back().rungs.recomputed = {"0", "1"};
    CHECK(kinds(shortfall) ==
          Kinds{"raise the", "let the", "compute in", "freeze parameters", "use a"});
    CHECK(advice_for(shortfall)[1].rfind("let the ladder offload: set BRIMFUL_SCRATCH_DIR", 0) ==
          0);
    CHECK(to_string(shortfall, facts_of(shortfall))
              .find("; 8 pieces of 1 row, 2 modules recomputed (0, 1) (peak: 60.0 MiB).") !=
          std::string::npos);
    shortfall.device = c10::Device(c10::DeviceType::CUDA, 0);
    CHECK(advice_for(shortfall)[1].rfind("free memory of the host, so that the ladder", 0) == 0);
  }
  SECTION("bfloat16 already") {
    shortfall.autocast = true;
    CHECK(kinds(shortfall) ==
          Kinds{"raise the", "checkpoint activations", "freeze parameters", "use a"});
    shortfall.autocast = false;
    shortfall.standing->float32 = 0;
    CHECK(kinds(shortfall) ==
          Kinds{"raise the", "checkpoint activations", "freeze parameters", "use a"});
  }
  SECTION("several ranks") {
    shortfall.world_size = 4;
    CHECK(kinds(shortfall) == Kinds{"raise the", "checkpoint activations", "compute in",
                                    "freeze parameters", "shard the", "use a"});
  }
  SECTION("where the model is what fills the memory, its advice comes first") {
    shortfall.standing->parameters = 40 * kMiB;
    CHECK(kinds(shortfall) ==
          Kinds{"raise the", "freeze parameters", "checkpoint activations", "compute in", "use a"});
  }
  SECTION("state that could lie elsewhere, where it is more than what is missing") {
    shortfall.state_may_leave = true;
    CHECK(kinds(shortfall) == with({"raise the"}, rest));
    shortfall.standing->optimizer_state = 41 * kMiB;
    CHECK(kinds(shortfall)[1] == "keep the");
    CHECK(advice_for(shortfall)[1] ==
          "keep the optimizer's state in a file (ladder=[..., \"state\"]; optimizer state: 41.0 "
          "MiB)");
    shortfall.device = c10::Device(c10::DeviceType::CUDA, 0);
    shortfall.limit_bytes.reset();
    shortfall.others = {};
    CHECK(advice_for(shortfall)[0].rfind("keep the optimizer's state on the host (ladder=", 0) ==
          0);
    shortfall.state_may_leave = false;
    CHECK(kinds(shortfall)[0] == "freeze parameters");
    shortfall = example();
    shortfall.state_may_leave = true;
    shortfall.of = Shortfall::Of::optimizer;
    shortfall.optimizer_bytes = 51 * kMiB;  // 7 too many, of which the state has 8
    CHECK(kinds(shortfall)[1] == "keep the");
    shortfall.optimizer_bytes = 52 * kMiB;
    CHECK(kinds(shortfall)[1] == "take an");
  }
  SECTION("a share that is not worth it") {
    shortfall.used_bytes = 55 * kMiB;  // leaves 5 of 60
    CHECK(kinds(shortfall) == Kinds{"raise the", "freeze parameters", "use a"});
    shortfall.standing->trainable = 0;
    shortfall.standing->optimizer_state = 0;
    CHECK(kinds(shortfall) == Kinds{"raise the", "use a"});
  }
}

}  // namespace test_too_large
