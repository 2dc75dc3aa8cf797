#include <c10/util/Exception.h>
#include "support/catch.h"

#include <brimful/reducer/bucket_plan.h>

using brimful::BucketPlan;
using brimful::ParameterInfo;
using brimful::plan_buckets;
using brimful::PlanOptions;
using Indices = std::vector<int64_t>;

namespace {
constexpr auto kFloat = c10::ScalarType::Float;
constexpr auto kHalf = c10::ScalarType::Half;
const c10::Device kCpu(c10::DeviceType::CPU);
const c10::Device kGpu(c10::DeviceType::CUDA, 0);

ParameterInfo floats(int64_t numel) {
  return {numel, kFloat, kCpu, false};
}

std::vector<Indices> indices(const BucketPlan& plan) {
  std::vector<Indices> result;
  for (const auto& bucket : plan.buckets) {
    result.push_back(bucket.parameters);
  }
  return result;
}
}  // namespace

TEST_CASE("Buckets fill from the last parameter and close at their cap", "[reducer]") {
  const std::vector<ParameterInfo> four{floats(10), floats(10), floats(10), floats(10)};
  CHECK(indices(plan_buckets(four, {1, 1})) == std::vector<Indices>{{3}, {2}, {1}, {0}});
  CHECK(indices(plan_buckets(four, {40, 80})) == std::vector<Indices>{{3}, {2, 1}, {0}});
  CHECK(indices(plan_buckets(four, {41, 1000})) == std::vector<Indices>{{3, 2}, {1, 0}});
  CHECK(indices(plan_buckets(four)) == std::vector<Indices>{{3, 2, 1, 0}});
}

TEST_CASE("A bucket holds one dtype and one device", "[reducer]") {
  const auto plan = plan_buckets({{4, kFloat, kCpu, false},
                                  {4, kHalf, kCpu, false},
                                  {4, kFloat, kGpu, false},
                                  {4, kFloat, kCpu, false}});
  CHECK(indices(plan) == std::vector<Indices>{{2}, {1}, {3, 0}});
  CHECK(plan.buckets[1].dtype == kHalf);
  CHECK(plan.buckets[0].device == kGpu);
}

TEST_CASE("The last bucket is dense and on the main device", "[reducer]") {
  const ParameterInfo sparse{4, kFloat, kCpu, true};
  CHECK(indices(plan_buckets({sparse, floats(4)})) == std::vector<Indices>{{0}, {1}});
  CHECK(indices(plan_buckets({floats(4), sparse, sparse}, {1, 1})) ==
        std::vector<Indices>{{2}, {1}, {0}});
  // The GPU's bucket would close last, but the record rides on the device of the first parameter.
  const auto plan = plan_buckets({{4, kFloat, kCpu, false}, {4, kFloat, kGpu, false}}, {1, 1000});
  CHECK(plan.buckets.back().device == kCpu);
}

TEST_CASE("Where no bucket can carry the record, an empty one does", "[reducer]") {
  const auto plan = plan_buckets({{4, kHalf, kCpu, true}, {4, kHalf, kCpu, true}});
  CHECK(indices(plan) == std::vector<Indices>{{1}, {0}, {}});
  CHECK(plan.buckets.back().dtype == kFloat);
  CHECK_FALSE(plan.buckets.back().sparse);
}

TEST_CASE("Every parameter is in exactly one bucket", "[reducer]") {
  std::vector<ParameterInfo> infos;
  for (int64_t i = 0; i < 60; ++i) {
    infos.push_back(
        {1 + i * 7 % 31, i % 3 == 0 ? kHalf : kFloat, i % 7 == 0 ? kGpu : kCpu, i % 11 == 5});
  }
  for (const int64_t cap : {1, 60, 100, 100000}) {
    std::vector<int> seen(infos.size(), 0);
    const auto plan = plan_buckets(infos, {cap, cap});
    for (const auto& bucket : plan.buckets) {
      for (const auto i : bucket.parameters) {
        ++seen[i];
        CHECK(infos[i].dtype == bucket.dtype);
        CHECK(infos[i].device == bucket.device);
        CHECK(infos[i].sparse == bucket.sparse);
      }
    }
    CHECK(seen == std::vector<int>(infos.size(), 1));
    CHECK_FALSE(plan.buckets.back().sparse);
    CHECK(plan.buckets.back().device == kGpu);  // of parameter 0
  }
}

TEST_CASE("A plan needs parameters and positive caps", "[reducer]") {
  CHECK_THROWS_WITH(plan_buckets({}), Catch::Contains("(parameters: 0)"));
  CHECK_THROWS_AS(plan_buckets({floats(1)}, {0, 1}), c10::ValueError);
  CHECK_THROWS_WITH(plan_buckets({floats(1)}, {1, -5}), Catch::Contains("bucket_bytes: -5"));
}

TEST_CASE("A plan is readable, a line a bucket", "[reducer]") {
  const std::vector<ParameterInfo> infos{floats(256), {512, kHalf, kCpu, true}};
  CHECK(to_string(plan_buckets(infos), infos) ==
        "bucket 0: 1 parameters, sparse Half, cpu, 1.0 KiB\nbucket 1: 1 parameters, Float, cpu, "
        "1.0 KiB\n");
}
