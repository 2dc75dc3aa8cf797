#include "support/catch.h"

#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>
#include <c10/util/Exception.h>

namespace test_schedule_text {

using namespace brimful::pipeline;
using Catch::Contains;
using Kind = ActionKind;

namespace {
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}
}  // namespace

TEST_CASE("Actions are written and read in torch's grammar", "[pipeline]") {
  const std::vector<std::pair<std::string, Action>> pairs{
      {"0F0", {0, Kind::forward, 0}},
      {"1B2", {1, Kind::backward, 2}},
      {"3I10", {3, Kind::backward_input, 10}},
      {"12W7", {12, Kind::backward_weight, 7}},
      {"0SEND_F0", {0, Kind::send_forward, 0}},
      {"1RECV_F0", {1, Kind::receive_forward, 0}},
      {"1SEND_B3", {1, Kind::send_backward, 3}},
      {"0RECV_B3", {0, Kind::receive_backward, 3}}};
  for (const auto& [text, action] : pairs) {
    CHECK(to_string(action) == text);
    CHECK((parse_action(text) == action));
    CHECK((parse_action(" " + text + "\r") == action));
  }
}

TEST_CASE("What is no action is refused with what one is", "[pipeline]") {
  for (const std::string text :
       {"", "F", "0F", "F0", "0X0", "0f0", "0F0 1F0", "-1F0", "0F-1", "0FB0", "0UNSHARD",
        "1000000F0", "99999999999999999999F0", "0F0x"}) {
    const auto error = error_of([&] { parse_action(text); });
    INFO(text);
    CHECK_THAT(error, Contains("this is no action (text: '" + text + "')"));
    CHECK_THAT(error, Contains("write a stage, one of F, B, I, W"));
  }
}

TEST_CASE("A schedule survives being written and read", "[pipeline]") {
  for (const auto& name : schedule_names()) {
    const auto schedule = make_schedule(name, 3, name == "zbv" || name == "dualpipev" ? 2 : 1, 5);
    for (const auto& written : {schedule, with_communication(schedule)}) {
      const auto read = from_csv(to_csv(written), name);
      CHECK((read.ranks == written.ranks));
      CHECK(read.stages == written.stages);
      CHECK(read.microbatches == written.microbatches);
      CHECK(read.name == name);
      CHECK(read.ignored == 0);
    }
  }
  CHECK(to_csv(gpipe(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
}

TEST_CASE("A file of torch's is read with its idle cells, overlaps and sharding", "[pipeline]") {
  const auto schedule = from_csv(
      "0UNSHARD,0F0,0SEND_F0,,(0F1;0B0)OVERLAP_F_B,0WAIT_SEND_F0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_"
      "GRAD\r\n"
      ",\"1F0\", ,(1F1;1B0)OVERLAP_F_B,1B1,1RESHARD,1WAIT_SEND_B0,,\r\n\r\n\n",
      "mine");
  REQUIRE(schedule.ranks.size() == 2);
  CHECK(to_csv(schedule) == "0F0,0SEND_F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  CHECK(schedule.ignored == 6);
  CHECK(schedule.stages == 2);
  CHECK(schedule.microbatches == 2);
}

TEST_CASE("A cell that cannot be read is named by its line and number", "[pipeline]") {
  CHECK_THAT(error_of([] { from_csv("0F0,0B0\n1F0,,1Q0"); }),
             Contains("a cell holds no action (line: 2, cell: 3, text: '1Q0')"));
  CHECK_THAT(error_of([] { from_csv("(0F0;0B1"); }),
             Contains("line: 1, cell: 1, text: '(0F0;0B1'"));
  CHECK_THAT(error_of([] { from_csv("(0F0;0B1)TOGETHER"); }),
             Contains("text: '(0F0;0B1)TOGETHER'"));
  CHECK_THAT(error_of([] { from_csv("(0F0;x)OVERLAP_F_B"); }), Contains("text: 'x'"));
  CHECK_THAT(error_of([] { from_csv("F0UNSHARD"); }), Contains("text: 'F0UNSHARD'"));
  for (const auto* empty : {"", "\n\n", ",,,\n,", "0UNSHARD"}) {
    CHECK_THAT(error_of([&] { from_csv(empty, "mine"); }),
               Contains("the text holds no action (schedule: mine)"));
  }
}

TEST_CASE("Large numbers in a file cost no memory", "[pipeline]") {
  const auto schedule = from_csv("999999F999999");
  const auto result = check(schedule);
  REQUIRE(result.problems.size() == 1);
  CHECK(
      result.problems[0] ==
      "1000000 stages and 1000000 microbatches take 1000000000000 forwards, of which 1 are there");
}

}  // namespace test_schedule_text
