#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include "support/catch.h"

#include "reducer/wire.h"

#include <dlfcn.h>
#include <cmath>
#include <limits>
#include "support/gpu.h"

namespace test_wire {

using brimful::Wire;

namespace {
at::Tensor values(int64_t count, double salt, c10::ScalarType dtype = at::kFloat) {
  return (at::arange(count, at::kDouble) * 0.7137 + salt).sin().to(dtype);
}
}  // namespace

TEST_CASE("Gradients travel in the reduction dtype and back", "[reducer]") {
  const auto from = GENERATE(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
  const auto to = GENERATE(at::kFloat, at::kBFloat16, at::kHalf);
  if (from == to) {
    return;
  }
  const auto gradients = values(1000, 1, from);
  Wire wire(gradients, to, false);
  CHECK(wire.buffer().scalar_type() == to);
  wire.encode(gradients, 0.5);
  CHECK(at::equal(wire.buffer(), gradients.to(to) * 0.5));
  auto back = gradients.clone();
  wire.decode(back, 2);
  CHECK(at::allclose(back.to(at::kDouble), gradients.to(at::kDouble), 1e-2));
}

TEST_CASE("bfloat16 is rounded as torch rounds it, also at its edges", "[reducer]") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto gradients = at::cat(
      {values(4096, 2) * 1e3F, at::tensor({infinity, -infinity, nan, 0.0F, -0.0F, 1e-40F, 3.4e38F,
                                           1.00390625F, 1.01171875F, -1.00390625F})});
  Wire wire(gradients, at::kBFloat16, false);
  wire.encode(gradients, 1);
  CHECK(at::equal(at::nan_to_num(wire.buffer().to(at::kFloat), 7),
                  at::nan_to_num(gradients.to(at::kBFloat16).to(at::kFloat), 7)));
}

TEST_CASE("Error feedback gives back what rounding took", "[reducer]") {
  const auto from = GENERATE(at::kFloat, at::kDouble);  // own loop, ATen
  const auto constant = values(500, 3, from) * 1e-3;
  Wire with(constant, at::kBFloat16, true);
  Wire without(constant, at::kBFloat16, false);
  auto sum_with = at::zeros_like(constant);
  auto sum_without = at::zeros_like(constant);
  constexpr int kSteps = 200;
  for (int i = 0; i < kSteps; ++i) {
    auto gradients = constant.clone();
    with.encode(gradients, 1);
    with.decode(gradients, 1);
    sum_with += gradients;
    gradients = constant.clone();
    without.encode(gradients, 1);
    without.decode(gradients, 1);
    sum_without += gradients;
  }
  const auto error = [&](const at::Tensor& sum) {
    return ((sum - constant * kSteps).abs() / (constant.abs() * kSteps)).max().item<double>();
  };
  CHECK(error(sum_with) < 1.0 / 256 / 20);
  CHECK(error(sum_without) > 1.0 / 256 / 4);
}

TEST_CASE("An attempt that is not decoded leaves no trace in the error", "[reducer]") {
  const auto first = values(300, 4);
  const auto other = values(300, 5);
  Wire wire(first, at::kBFloat16, true);
  Wire clean(first, at::kBFloat16, true);
  const auto step = [](Wire& w, const at::Tensor& gradients) {
    auto row = gradients.clone();
    w.encode(row, 0.5);
    w.decode(row, 1);
    return row;
  };
  step(wire, first);
  step(clean, first);
  wire.encode(other, 0.5);  // repeated
  wire.encode(first, 0.5);  // drained
  wire.clear();
  CHECK(at::all(wire.buffer() == 0).item<bool>());
  CHECK(at::equal(step(wire, other), step(clean, other)));
  CHECK(at::equal(step(wire, first), step(clean, first)));
}

TEST_CASE("A gradient that is not finite spoils one step, not the error", "[reducer]") {
  const auto from = GENERATE(at::kFloat, at::kDouble);
  auto bad = values(8, 6, from);
  bad[3] = std::numeric_limits<double>::infinity();
  bad[4] = std::numeric_limits<double>::quiet_NaN();
  Wire wire(bad, at::kBFloat16, true);
  wire.encode(bad, 1);
  wire.decode(bad, 1);
  auto good = values(8, 7, from);
  wire.encode(good, 1);
  wire.decode(good, 1);
  CHECK(at::isfinite(good).all().item<bool>());
}

TEST_CASE("A reduction dtype rounds once on a CUDA device, as on the CPU", "[reducer][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const bool feedback = GENERATE(false, true);
  const double scale = feedback ? 0.5 : 1.0 / 3;  // a sum of products may round once less there
  const auto gradients = values((1 << 18) + 7, 8);
  const auto there = gradients.to(at::kCUDA);
  Wire here_wire(gradients, at::kBFloat16, feedback);
  Wire there_wire(there, at::kBFloat16, feedback);
  for (int step = 0; step < 3; ++step) {
    auto here_row = gradients.clone();
    auto there_row = there.clone();
    here_wire.encode(here_row, scale);
    there_wire.encode(there_row, scale);
    CHECK(at::equal(there_wire.buffer().cpu(), here_wire.buffer()));
    here_wire.decode(here_row, 1.0 / 3, 0.5);
    there_wire.decode(there_row, 1.0 / 3, 0.5);
    CHECK(at::equal(there_row.cpu(), here_row));
    CHECK((!feedback || at::equal(there_wire.error().cpu(), here_wire.error())));
  }
}

TEST_CASE("A reduction dtype's launches on a CUDA device do not grow with the bucket",
          "[reducer][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const auto calls = reinterpret_cast<long (*)(const char*)>(dlsym(RTLD_DEFAULT, "sim_cuda_calls"));
  if (calls == nullptr) {
    return;  // only the simulated device counts them
  }
  const auto launches = [&](int64_t numel) {
    auto row = values(numel, 9).to(at::kCUDA);
    Wire wire(row, at::kBFloat16, true);
    const auto before = calls("operator");
    wire.encode(row, 0.5);
    wire.decode(row, 0.5, 0.25);
    return calls("operator") - before;
  };
  const auto small = launches(1000);
  CHECK(small <= 8);
  CHECK(launches(1 << 20) == small);
}

}  // namespace test_wire
