#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <brimful/sizer/autocast.h>
#include <c10/util/Exception.h>
#include <stdexcept>
#include "support/catch.h"

namespace test_autocast {

using brimful::Autocast;

namespace {

bool is_on() {
  return at::autocast::is_autocast_enabled(at::kCPU);
}

c10::ScalarType result_type() {
  return at::linear(at::ones({2, 4}), at::ones({3, 4})).scalar_type();
}

}  // namespace

TEST_CASE("operations run in the guard's dtype, and in the old one after it", "[sizer]") {
  CHECK(result_type() == at::kFloat);
  {
    const Autocast guard(at::kCPU);
    CHECK(result_type() == at::kBFloat16);
    {
      const Autocast half(at::kCPU, at::kHalf);
      CHECK(result_type() == at::kHalf);
      {
        const Autocast off(at::kCPU, {}, false);
        CHECK(result_type() == at::kFloat);
      }
      CHECK(result_type() == at::kHalf);
    }
    CHECK(result_type() == at::kBFloat16);
  }
  CHECK(result_type() == at::kFloat);
  CHECK(at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16);
}

TEST_CASE("an exception ends the guard", "[sizer]") {
  const auto fail = [] {
    const Autocast guard(at::kCPU);
    throw std::runtime_error("in the forward");
  };
  CHECK_THROWS_WITH(fail(), "in the forward");
  CHECK_FALSE(is_on());
}

TEST_CASE("casts of parameters are kept until the outermost guard ends", "[sizer]") {
  const auto input = at::ones({1, 1});
  const auto weight = at::ones({1, 1}).set_requires_grad(true);
  const auto result = [&] { return at::linear(input, weight).item<float>(); };
  {
    const Autocast outer(at::kCPU);
    CHECK(result() == 1);
    weight.data().fill_(5);
    CHECK(result() == 1);  // the cast is kept
    {
      const Autocast inner(at::kCPU);
      CHECK(result() == 1);
    }
    CHECK(result() == 1);  // the inner guard left it
    {
      const Autocast without(at::kCPU, {}, true, false);
      CHECK_FALSE(at::autocast::is_autocast_cache_enabled());
      CHECK(result() == 5);
    }
    CHECK(at::autocast::is_autocast_cache_enabled());
  }
  const Autocast again(at::kCPU);
  CHECK(result() == 5);
}

TEST_CASE("a guard that cannot be changes nothing", "[sizer]") {
  CHECK_THROWS_AS(Autocast(at::kCPU, at::kDouble), c10::ValueError);
  CHECK_THROWS_WITH(Autocast(at::kCPU, at::kFloat), Catch::Contains("(dtype: Float); pass one"));
  CHECK_THROWS_WITH(Autocast(at::kMeta), Catch::Contains("(device type: meta); use at::kCPU"));
  CHECK_FALSE(is_on());
  CHECK(result_type() == at::kFloat);
  const Autocast guard(at::kCPU);
  CHECK(result_type() == at::kBFloat16);
}

TEST_CASE("the device types have guards of their own", "[sizer]") {
  const Autocast cuda(at::kCUDA);
  CHECK(at::autocast::is_autocast_enabled(at::kCUDA));
  CHECK_FALSE(is_on());
  CHECK(result_type() == at::kFloat);
}

}  // namespace test_autocast
