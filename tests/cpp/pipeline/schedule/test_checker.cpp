#include "support/catch.h"

#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>
#include <c10/util/Exception.h>

namespace test_checker {

using namespace brimful::pipeline;
using Catch::Contains;

namespace {
std::string verdict(const std::string& csv, const CheckOptions& options = {}) {
  return check(from_csv(csv), options).to_string();
}

Schedule two_ranks() {
  return with_communication(one_forward_one_backward(2, 2));
}
}  // namespace

TEST_CASE("What is missing, doubled or misplaced is named", "[pipeline]") {
  CHECK(verdict("0F0,0B0\n1F0,1B0") == "valid");
  CHECK(verdict("0F0,0F1\n1F0,1F1") == "valid");
  CHECK(verdict("0F0,0B0,0F1\n1F0,1B0,1F1,1B1") == "0B1 is missing, or 0I1 and 0W1");
  CHECK(verdict("0F0,0B0\n1F0,1I0") == "1W0 is missing beside 1I0");
  CHECK(verdict("0F0,0B0\n1F0,1W0") == "1I0 is missing beside 1W0");
  CHECK(verdict("0F0,0B0\n1F0,1B0,1W0") == "1B0 and 1W0 are both there");
  CHECK(verdict("0F0,0F1\n1F0") == "1F1 is missing");
  CHECK(verdict("0F0,0B0,0F0\n1F0,1B0") ==
        "0F0 (rank 0, action 2) is there already (rank 0, action 0)");
  CHECK(verdict("0F0,1F0\n1B0,0B0") == "stage 1 is on ranks 0 and 1; stage 0 is on ranks 0 and 1");
  CHECK(verdict("0F0,0B0\n1B0,1F0") ==
        "1B0 (rank 1, action 0) comes before 1F0 (action 1), which it needs");
  CHECK(verdict("0F0,0W0,0I0\n1F0,1B0") ==
        "0W0 (rank 0, action 1) comes before 0I0 (action 2), which it needs");
  CHECK(verdict("1F0,0F0,1B0,0B0") ==
        "1F0 (rank 0, action 0) comes before 0F0 (action 1), which it needs");
  CHECK(verdict("0F0,1F0,0B0,1B0") ==
        "0B0 (rank 0, action 2) comes before 1B0 (action 3), which it needs");
}

TEST_CASE("Sends and receives are checked against the stages' ranks", "[pipeline]") {
  CHECK(check(two_ranks()).to_string() == "valid");
  CHECK(to_csv(two_ranks()) ==
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n");
  CHECK(verdict("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0") ==
        "1RECV_F0 is missing: stage 0 is on rank 0, stage 1 on rank 1");
  CHECK(verdict("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0") ==
        "0SEND_F0 is missing: stage 0 is on rank 0, stage 1 on rank 1");
  CHECK(verdict("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0") ==
        "0B0 (rank 0, action 2) comes before 0RECV_B0 (action 3), which it needs");
  CHECK(verdict("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0") ==
        "0SEND_F0 (rank 0, action 0) comes before 0F0 (action 1), which it needs");
  CHECK(verdict("0F0,0SEND_B0\n1F0,1SEND_F0") ==
        "0SEND_F0 is missing: stage 0 is on rank 0, stage 1 on rank 1; "
        "1RECV_F0 is missing: stage 0 is on rank 0, stage 1 on rank 1; "
        "0SEND_B0 (rank 0, action 1) has no other end: stage 0 is the first; "
        "1SEND_F0 (rank 1, action 1) has no other end: stage 1 is the last");
  CHECK(verdict("0F0,0SEND_F0,1RECV_F0,1F0") ==
        "0SEND_F0 (rank 0, action 1) is between stages of one rank, which send nothing; "
        "1RECV_F0 (rank 0, action 2) is between stages of one rank, which send nothing");
  CHECK(verdict("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1SEND_B0") ==
        "0RECV_B0 (rank 0, action 2) is in a schedule without backwards; "
        "1SEND_B0 (rank 1, action 2) is in a schedule without backwards");
}

TEST_CASE("A deadlock is reported as a circle", "[pipeline]") {
  // Each wants the other's second microbatch first.
  CHECK(verdict("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1") ==
        "it deadlocks: rank 0 waits at 0B0 (action 1) for 1B0 of rank 1, which waits at 1F1 "
        "(action 1) "
        "for 0F1 of rank 0");
  CHECK(verdict("0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
                "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1") ==
        "it deadlocks: rank 0 waits at 0RECV_B0 (action 2) for 1SEND_B0 of rank 1, which waits at "
        "1RECV_F1 (action 2) for 0SEND_F1 of rank 0");
  // Rank 0 is not in the circle, and waits for it.
  const auto text = verdict("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1");
  CHECK(text ==
        "it deadlocks: rank 1 waits at 1B0 (action 1) for 2B0 of rank 2, which waits at 2F1 "
        "(action 1) "
        "for 1F1 of rank 1");
}

TEST_CASE("A send waits for room in its channel", "[pipeline]") {
  const auto schedule = two_ranks();
  CHECK(check(schedule, {2, ChannelKind::by_rank}).ok());
  CHECK(check(schedule, {1, ChannelKind::by_rank}).ok());
  CHECK(check(schedule, {0, ChannelKind::by_rank}).to_string() ==
        "it deadlocks: rank 0 waits at 0SEND_F1 (action 3) for 1RECV_F1 of rank 1, which waits at "
        "1SEND_B0 (action 3) for 0RECV_B0 of rank 0");
  const auto compute_only = one_forward_one_backward(2, 2);
  CHECK(check(compute_only).ok());
  CHECK(check(compute_only, {0, ChannelKind::by_rank}).cycle ==
        check(schedule, {0, ChannelKind::by_rank}).cycle);
  CHECK(check(with_communication(compute_only, ReceivePlace::when_sent), {0, ChannelKind::by_rank})
            .ok());
  CHECK(check(gpipe(1, 4), {0, ChannelKind::by_rank}).ok());
  CHECK_THROWS_WITH(check(schedule, {-1, ChannelKind::by_rank}),
                    Contains("fewer than 0 messages (channel_capacity: -1)"));
}

TEST_CASE("Messages that overtake each other need a channel for each stage", "[pipeline]") {
  // Stages 0 and 2 on rank 0, 1 and 3 on rank 1: both rank's messages go through one FIFO.
  const std::string csv =
      "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1\n"
      "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F1,3F1,3RECV_F0,3F0";
  CHECK(verdict(csv) ==
        "3RECV_F1 (rank 1, action 6) would get the message of 2SEND_F0 (rank 0, action 6), which "
        "is sent "
        "before its own");
  CHECK_THAT(verdict(csv, {std::nullopt, ChannelKind::by_stage}), Contains("3RECV_F1 (rank 1"));
  const std::string by_stage =
      "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1\n"
      "1RECV_F0,1F0,1SEND_F0,3RECV_F0,3F0,1RECV_F1,1F1,1SEND_F1,3RECV_F1,3F1";
  CHECK_THAT(verdict(by_stage), Contains("3RECV_F0 (rank 1, action 3) would get the message of "
                                         "0SEND_F1 (rank 0, action 3)"));
  CHECK(verdict(by_stage, {std::nullopt, ChannelKind::by_stage}) == "valid");
  CHECK(verdict(csv, {std::nullopt, ChannelKind::by_message}) == "valid");
}

TEST_CASE("A long list of problems is cut", "[pipeline]") {
  auto schedule = gpipe(4, 16);
  schedule.ranks[2].clear();
  const auto problems = check(schedule).problems;
  REQUIRE(problems.size() == 21);
  CHECK(problems[0] == "2F0 is missing");
  CHECK(problems[20] == "and more like these");
}

TEST_CASE("A schedule that cannot be run is refused with the reason", "[pipeline]") {
  CHECK_NOTHROW(require_valid(gpipe(2, 2)));
  const auto bad = from_csv("0F0,0F1\n1F0", "mine");
  CHECK_THROWS_AS(require_valid(bad), c10::ValueError);
  CHECK_THROWS_WITH(
      require_valid(bad),
      Contains("the schedule cannot be run (schedule: mine): 1F1 is missing; correct it"));
  CHECK_THROWS_WITH(with_communication(bad), Contains("1F1 is missing"));
  CHECK_THROWS_WITH(with_communication(two_ranks()), Contains("has sends and receives already"));
  CHECK_THROWS_WITH(require_valid({}), Contains("there is nothing to do (stages: 0"));
}

TEST_CASE("The rank of a stage is that of its actions", "[pipeline]") {
  CHECK(rank_of_stage(zbv(2, 1)) == std::vector<int>{0, 1, 1, 0});
  CHECK(rank_of_stage(interleaved_1f1b(2, 2, 1)) == std::vector<int>{0, 1, 0, 1});
  CHECK(rank_of_stage({"mine", 2, 1, {{{1, ActionKind::forward, 0}}}}) == std::vector<int>{-1, 0});
  CHECK_THROWS_WITH(rank_of_stage(from_csv("0F0,1F0\n1F1")),
                    Contains("a stage is on two ranks (schedule: csv, stage: 1, ranks: 0 and 1)"));
  CHECK_THROWS_WITH(rank_of_stage({"mine", 1, 1, {{{1, ActionKind::forward, 0}}}}),
                    Contains("(schedule: mine, stage: 1, stages: 1)"));
}

}  // namespace test_checker
