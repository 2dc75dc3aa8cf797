#include <c10/util/Exception.h>
#include <cmath>
#include <nlohmann/json.hpp>
#include "base/chrome_trace.h"
#include "base/json.h"
#include "support/catch.h"

namespace test_json {

TEST_CASE("Lists of integers are kept as they are", "[base]") {
  const std::vector<std::vector<int64_t>> lists{{3, -1}, {}, {int64_t{1} << 60}};
  CHECK(brimful::lists_to_json(lists) == "[[3,-1],[],[1152921504606846976]]");
  CHECK(brimful::lists_from_json(brimful::lists_to_json(lists)) == lists);
  for (const char* text : {"", "{}", "[1]", "[[\"a\"]]", "[[1]"}) {
    CHECK_THROWS_AS(brimful::lists_from_json(text), c10::ValueError);
  }
}

TEST_CASE("A string is quoted and escaped", "[base]") {
  CHECK(brimful::json_string("a\"b\n") == "\"a\\\"b\\n\"");
  CHECK_NOTHROW(brimful::json_string("\xff"));
}

TEST_CASE("A trace is JSON whatever its names and numbers are", "[base]") {
  brimful::ChromeTrace trace;
  trace.name_thread(1, 2, "a \"name\"\xff");
  trace.slice(1, 2, "step", "a\"b", 1.5, 2, {{"c\"d", std::nan("")}});
  trace.counter(1, "memory", 4e15 + 0.5, {{"other", 7}});
  const auto events = nlohmann::json::parse(trace.json())["traceEvents"];
  REQUIRE(events.size() == 3);
  CHECK(events[0]["args"]["name"] == "a \"name\"\xef\xbf\xbd");
  CHECK(events[1]["args"]["c\"d"].is_null());
  CHECK(events[2]["ts"] == 4e15 + 0.5);
  CHECK(events[2]["args"]["other"] == 7);
}

}  // namespace test_json
