#include <c10/util/Exception.h>
#include "support/catch.h"

#include <brimful/reducer/bucket_plan.h>

namespace test_bucket_plan {

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

TEST_CASE("With a list each bucket has its own cap, and the last one is repeated", "[reducer]") {
  const std::vector<ParameterInfo> eight(8, floats(10));
  PlanOptions options;
  options.bucket_bytes_list = {80, 40, 120};
  CHECK(indices(plan_buckets(eight, options)) ==
        std::vector<Indices>{{7, 6}, {5}, {4, 3, 2}, {1, 0}});
  options.bucket_bytes_list = {1, 80};
  CHECK(indices(plan_buckets(eight, options)) ==
        std::vector<Indices>{{7}, {6, 5}, {4, 3}, {2, 1}, {0}});
  options.order = {0, 2, 4, 6, 1, 3, 5, 7};
  CHECK(indices(plan_buckets(eight, options)) ==
        std::vector<Indices>{{0}, {2, 4}, {6, 1}, {3, 5}, {7}});
}

TEST_CASE("Each dtype goes through the list of caps by itself", "[reducer]") {
  const ParameterInfo half{20, kHalf, kCpu};
  const ParameterInfo sparse{10, kFloat, kCpu, true};
  PlanOptions options;
  options.bucket_bytes_list = {40, 80};
  CHECK(indices(plan_buckets({floats(10), half, floats(10), half, half, floats(10)}, options)) ==
        std::vector<Indices>{{5}, {4}, {3, 1}, {2, 0}});
  // A large one is a bucket as any other; a sparse one takes no entry, as in torch.
  options.direct_bytes = 400;
  CHECK(indices(plan_buckets({floats(10), floats(10), floats(100)}, options)) ==
        std::vector<Indices>{{2}, {1, 0}});
  CHECK(indices(plan_buckets({floats(10), floats(10), sparse}, options)) ==
        std::vector<Indices>{{2}, {1}, {0}});
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
  PlanOptions listed;
  listed.bucket_bytes_list = {1, 0};
  CHECK_THROWS_WITH(plan_buckets({floats(1)}, listed),
                    Catch::Contains("bucket_bytes_list: [1, 0]"));
}

TEST_CASE("A plan is readable, a line a bucket", "[reducer]") {
  const std::vector<ParameterInfo> infos{floats(256), {512, kHalf, kCpu, true}};
  CHECK(to_string(plan_buckets(infos), infos) ==
        "bucket 0: 1 parameters, sparse Half, cpu, 1.0 KiB\nbucket 1: 1 parameters, Float, cpu, "
        "1.0 KiB\n");
}

TEST_CASE("A large parameter is a direct bucket, and the record then has its own", "[reducer]") {
  const ParameterInfo large = floats(1 << 20);
  const auto only_large = plan_buckets({large, large});
  CHECK(indices(only_large) == std::vector<Indices>{{1}, {0}, {}});
  CHECK(only_large.buckets[0].direct);
  CHECK_FALSE(only_large.buckets[2].direct);
  const auto mixed = plan_buckets({floats(3), large, floats(3), large});
  CHECK(indices(mixed) == std::vector<Indices>{{3}, {1}, {2, 0}});
  ParameterInfo strided = large;
  strided.packed = false;
  CHECK_FALSE(plan_buckets({strided}).buckets[0].direct);
  CHECK_FALSE(plan_buckets({floats((1 << 20) - 1)}).buckets[0].direct);
  auto of_device = floats(1 << 20);
  of_device.device = c10::Device(c10::DeviceType::CUDA, 0);
  CHECK_FALSE(plan_buckets({of_device}).buckets[0].direct);
}

TEST_CASE("A plan follows the order in which gradients come", "[reducer]") {
  const std::vector<ParameterInfo> four{floats(10), floats(10), floats(10), floats(10)};
  PlanOptions options{40, 80};
  options.order = {1, 3, 0, 2};
  CHECK(indices(plan_buckets(four, options)) == std::vector<Indices>{{1}, {3, 0}, {2}});
  options.order = {1, 3, 0};
  CHECK_THROWS_AS(plan_buckets(four, options), c10::ValueError);
  options.order = {1, 3, 0, 0};
  CHECK_THROWS_AS(plan_buckets(four, options), c10::ValueError);
}

TEST_CASE("The record's dtype and device do not depend on the order", "[reducer]") {
  const std::vector<ParameterInfo> mixed{{4, kHalf, kCpu}, {4, kFloat, kCpu}, {4, kFloat, kGpu}};
  for (Indices order : {Indices{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {1, 2, 0}}) {
    PlanOptions options{1, 1};
    options.order = order;
    const auto plan = plan_buckets(mixed, options);
    CHECK(plan.buckets.back().dtype == kHalf);
    CHECK(plan.buckets.back().device == kCpu);
  }
}

TEST_CASE("A plan can be kept as text", "[reducer]") {
  const std::vector<ParameterInfo> infos{
      floats(1 << 20), floats(3), {5, kHalf, kCpu}, {7, kFloat, kCpu, true}, floats(9)};
  for (const bool own_record : {false, true}) {
    PlanOptions options;
    options.own_record = own_record;
    const auto plan = plan_buckets(infos, options);
    const auto back = plan_from_json(to_json(plan), infos, options);
    REQUIRE(indices(back) == indices(plan));
    for (size_t i = 0; i < plan.buckets.size(); ++i) {
      CHECK(back.buckets[i].direct == plan.buckets[i].direct);
      CHECK(back.buckets[i].sparse == plan.buckets[i].sparse);
      CHECK(back.buckets[i].dtype == plan.buckets[i].dtype);
    }
  }
}

TEST_CASE("A text that is no plan of the model is refused", "[reducer]") {
  const std::vector<ParameterInfo> infos{
      floats(1 << 20), floats(3), {5, kHalf, kCpu}, {7, kFloat, kCpu, true}};
  for (const char* text :
       {"", "7", "[]", "[[0],[3],[2],[1],[1]]", "[[0],[3],[2]]", "[[9],[3],[2],[1]]", "[[-1]]",
        "[[0,1],[3],[2]]", "[[3,1],[0],[2]]", "[[2,1],[0],[3]]", "[[1],[2],[0],[3]]",
        "[[],[0],[3],[2],[1]]", "[[0],[3],[1],[2]]"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(brimful::plan_from_json(text, infos), c10::ValueError);
  }
  CHECK_NOTHROW(brimful::plan_from_json("[[0],[3],[2],[1]]", infos));
  CHECK_NOTHROW(
      brimful::plan_from_json("[[0],[3],[2],[1],[]]", infos));  // an empty one may carry it
}

}  // namespace test_bucket_plan
