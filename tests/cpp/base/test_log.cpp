#include "support/catch.h"

#include <brimful/log.h>

#include <utility>
#include <vector>

namespace test_log {

using brimful::LogLevel;
using Lines = std::vector<std::pair<int, std::string>>;  // Catch2 must print it

namespace {
/// Collects lines, and puts the defaults back.
struct Collected {
  Collected() {
    brimful::set_log_sink([this](LogLevel level, const std::string& line) {
      lines.emplace_back(static_cast<int>(level), line);
    });
  }
  ~Collected() {
    brimful::set_log_sink(nullptr);
    brimful::set_log_level(before);
  }
  LogLevel before = brimful::log_level();
  Lines lines;
};
}  // namespace

TEST_CASE("Lines at or above the level reach the sink", "[log]") {
  Collected collected;
  brimful::set_log_level(LogLevel::warning);
  brimful::log(LogLevel::info, "below");
  brimful::log(LogLevel::warning, "at");
  brimful::log(LogLevel::error, "above");
  CHECK(collected.lines == Lines{{static_cast<int>(LogLevel::warning), "at"},
                                 {static_cast<int>(LogLevel::error), "above"}});
  CHECK(brimful::log_level() == LogLevel::warning);
}

TEST_CASE("Nothing passes a log that is off, and everything one at debug", "[log]") {
  Collected collected;
  brimful::set_log_level(LogLevel::off);
  brimful::log(LogLevel::error, "dropped");
  CHECK(collected.lines.empty());
  brimful::set_log_level(LogLevel::debug);
  brimful::log(LogLevel::debug, "kept");
  CHECK(collected.lines.size() == 1);
}

TEST_CASE("A sink may log and may be replaced from within", "[log]") {
  Collected collected;
  brimful::set_log_level(LogLevel::debug);
  brimful::set_log_sink([&](LogLevel level, const std::string& line) {
    brimful::set_log_sink([&](LogLevel inner, const std::string& text) {
      collected.lines.emplace_back(static_cast<int>(inner), text);
    });
    brimful::log(level, line + " again");
  });
  brimful::log(LogLevel::info, "once");
  REQUIRE(collected.lines.size() == 1);
  CHECK(collected.lines[0].second == "once again");
}

}  // namespace test_log
