#pragma once
// What the tests of a sizer on several ranks have in common.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>

namespace brimful::test {

using Type = Caught::Type;
using Split = std::vector<int64_t>;

/// Memory is counted, and shortages that a test plants are not logged, while it lives.
struct Quiet {
  Quiet() {
    memory::install();
    set_log_level(LogLevel::error);
  }
  ~Quiet() { set_log_level(LogLevel::warning); }
};

}  // namespace brimful::test
