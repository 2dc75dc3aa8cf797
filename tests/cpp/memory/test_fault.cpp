#include <ATen/core/Tensor.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <thread>
#include <vector>
#include "support/catch.h"

namespace test_fault {

namespace memory = brimful::memory;
using memory::FaultAt;

namespace {

int64_t used() {
  return memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes;
}

c10::DataPtr take(size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

/// A convolution and two linear layers, trained by gradient descent.
struct Net {
  Net() {
    for (const auto& parameter : parameters) {
      parameter.set_requires_grad(true);
    }
  }

  void step() {
    auto x = at::conv2d(input, parameters[0], parameters[1]).relu().flatten(1);
    x = at::linear(x, parameters[2], parameters[3]).relu();
    x = at::linear(x, parameters[4]);
    at::mse_loss(x, target).backward();
    const c10::AutoGradMode no_grad(false);
    for (const auto& parameter : parameters) {
      parameter.sub_(parameter.grad(), 0.01);
    }
  }

  void zero_grad() {
    for (const auto& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
  }

  at::Tensor input = at::randn({4, 2, 8, 8});
  at::Tensor target = at::ones({4, 3});
  std::vector<at::Tensor> parameters{at::randn({4, 2, 3, 3}), at::randn({4}), at::randn({16, 144}),
                                     at::randn({16}), at::randn({3, 16})};
};

}  // namespace

TEST_CASE("FaultAt refuses the allocation it names, once, on its thread", "[memory]") {
  FaultAt fault(1);
  const auto before = used();
  CHECK_NOTHROW(take(10));
  CHECK_NOTHROW(take(0));
  CHECK_FALSE(fault.fired());
  std::thread([] { CHECK_NOTHROW(take(10)); }).join();
  {
    const memory::Unlimited unlimited;
    CHECK_NOTHROW(take(10));
  }
  CHECK(fault.seen() == 1);
  CHECK_THROWS_AS(take(10), c10::OutOfMemoryError);
  CHECK(fault.fired());
  CHECK(fault.seen() == 2);
  CHECK_NOTHROW(take(10));
  CHECK(fault.seen() == 3);
  CHECK(used() == before);
}

TEST_CASE("FaultAts nest, each with its own count", "[memory]") {
  FaultAt outer(3);
  take(1);
  {
    FaultAt inner(1);
    take(1);
    CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
    CHECK(inner.fired());
    CHECK_FALSE(outer.fired());
  }
  CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
  CHECK(outer.fired());
  CHECK(outer.seen() == 4);
}

TEST_CASE("FaultAt ends with its scope and wants an index that is not negative", "[memory]") {
  { const FaultAt fault(0); }
  CHECK_NOTHROW(take(10));
  CHECK_THROWS_AS(FaultAt(-1), c10::ValueError);
  CHECK_NOTHROW(take(10));
}

TEST_CASE("a fault at any allocation of a training step arrives typed and leaves no byte behind",
          "[memory]") {
  memory::install();
  Net net;
  net.step();
  net.zero_grad();
  const auto before = used();
  FaultAt never(int64_t{1} << 40);
  net.step();
  net.zero_grad();
  const auto allocations = never.seen();
  REQUIRE(allocations > 20);
  for (int64_t index = 0; index < allocations; ++index) {
    CAPTURE(index);
    const FaultAt fault(index);
    REQUIRE_THROWS_AS(net.step(), c10::OutOfMemoryError);
    net.zero_grad();
    REQUIRE(used() == before);
  }
}

TEST_CASE("FaultAt counts allocations under an Unlimited where it is asked to", "[memory]") {
  FaultAt passed_over(0);
  FaultAt counted(1, /*unlimited_too=*/true);
  const memory::Unlimited unlimited;
  take(8);
  CHECK(passed_over.seen() == 0);
  CHECK(counted.seen() == 1);
  CHECK_THROWS_AS(take(8), c10::OutOfMemoryError);
  CHECK(counted.fired());
  CHECK_FALSE(passed_over.fired());
}

}  // namespace test_fault
