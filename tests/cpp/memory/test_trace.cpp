#include <brimful/memory/stats.h>
#include <brimful/memory/trace.h>
#include "support/catch.h"

#include <c10/core/CPUAllocator.h>

#include <thread>

namespace test_trace {

using brimful::memory::peak_bytes;
using brimful::memory::Trace;
using brimful::memory::TraceScope;

namespace {
c10::DataPtr take(size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}
}  // namespace

TEST_CASE("A trace has what its thread took and gave back, in order", "[memory]") {
  brimful::memory::install();
  auto before = take(100);
  Trace inner_trace;
  const TraceScope scope;
  auto first = take(200);
  {
    const TraceScope inner;
    before.clear();
    std::thread([] { take(999); }).join();
    const auto second = take(300);
    inner_trace = inner.trace();
  }
  CHECK(inner_trace == Trace{-100, 300});
  CHECK(scope.trace() == Trace{200, -100, 300, -300});
  take(0);
  CHECK(scope.trace().size() == 4);
}

TEST_CASE("Nothing is traced behind the scope's end, nor what is refused", "[memory]") {
  brimful::memory::install();
  const c10::Device cpu(c10::DeviceType::CPU);
  Trace trace;
  {
    const TraceScope scope;
    brimful::memory::set_limit(cpu, 0);
    CHECK_THROWS_AS(take(10), c10::OutOfMemoryError);
    brimful::memory::set_limit(cpu, std::nullopt);
    trace = scope.trace();
  }
  CHECK(trace.empty());
  const TraceScope next;
  CHECK(next.trace().empty());
}

TEST_CASE("The peak of a trace is its fullest moment", "[memory]") {
  CHECK(peak_bytes({}) == 0);
  CHECK(peak_bytes({-5}) == 0);
  CHECK(peak_bytes({10, 20, -10, 5, -20, -5}) == 30);
  CHECK(peak_bytes({-10, 20, -20, 15}) == 10);
}

}  // namespace test_trace
