#include "sizer/step_trace.h"
#include "support/catch.h"

#include <string>

namespace test_step_trace {

using brimful::PeakModel;
using brimful::requests_of;
using brimful::traced_of;
using brimful::memory::CachingRequest;
using Kind = CachingRequest::Kind;

namespace {

/// "+0" takes a block, "-0" gives it back.
std::vector<std::string> names_of(const std::vector<CachingRequest>& requests) {
  std::vector<std::string> names;
  for (const auto& request : requests) {
    names.push_back((request.kind == Kind::take ? "+" : "-") + std::to_string(request.block));
  }
  return names;
}

}  // namespace

TEST_CASE("What a CUDA allocator was asked for is a trace, and comes back from it", "[sizer]") {
  const std::vector<CachingRequest> asked = {
      {Kind::take, 100, 10, 1}, {Kind::take, 200, 10, 2}, {Kind::give_back, 999},
      {Kind::give_back, 100},   {Kind::take, 100, 30, 1}, {Kind::give_back_pending, 200},
      {Kind::take, 300, 5, 1},  {Kind::complete, 200}};
  const auto traced = traced_of(4, asked);
  CHECK(traced.rows == 4);
  CHECK(traced.trace == brimful::memory::Trace{10, 10, -10, 30, 5, -10});
  const auto again = requests_of(traced.trace, traced.blocks, 7);
  CHECK(names_of(again) == std::vector<std::string>{"+0", "+1", "-0", "+3", "+4", "-1"});
  CHECK(again[1].stream == 2);
}

TEST_CASE("Of blocks that are not known the last of a size is given back", "[sizer]") {
  const auto requests = requests_of({10, 20, 10, -10, 0, -20, -99}, {}, 7);
  CHECK(names_of(requests) == std::vector<std::string>{"+0", "+1", "+2", "-2", "-1"});
  CHECK(requests[0].stream == 7);
}

TEST_CASE("A trace is forecast for other numbers of rows, with the blocks of the largest",
          "[sizer]") {
  const auto traced = [](int64_t rows) {
    return traced_of(rows, {{Kind::take, 1, 100 * rows, 3},
                            {Kind::take, 2, 512, 3},
                            {Kind::give_back, 1},
                            {Kind::give_back, 2}});
  };
  const auto model = PeakModel::fit({traced(2), traced(3), traced(16)});
  REQUIRE(model);
  CHECK(model->trace_at(50) == brimful::memory::Trace{5000, 512, -5000, -512});
  REQUIRE(model->blocks().size() == 4);
  CHECK(model->blocks()[2].taken_at == 0);
}

}  // namespace test_step_trace
