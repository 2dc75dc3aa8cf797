#pragma once
#include <brimful/log.h>

namespace brimful::test {

/// For failures that are planted.
struct QuietLog {
  QuietLog() { set_log_level(LogLevel::off); }
  ~QuietLog() { set_log_level(LogLevel::warning); }
};

}  // namespace brimful::test
