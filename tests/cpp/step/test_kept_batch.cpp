#include <ATen/ATen.h>
#include "support/catch.h"

#include <brimful/memory/stats.h>
#include <brimful/step/kept_batch.h>

namespace test_kept_batch {

using brimful::KeptBatch;
using Copies = KeptBatch::Copies;

namespace {
int64_t used_bytes() {
  return brimful::memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes;
}
}  // namespace

TEST_CASE("What changed in place is named the first time, and restored from then on", "[step]") {
  const auto x = at::arange(8.).view({4, 2});
  const auto y = at::arange(4.);
  KeptBatch kept;
  const auto before = used_bytes();
  kept.begin({{"x", x}, {"y", y}, {"none", at::Tensor()}});
  CHECK(used_bytes() == before);  // there is no copy of what does not change
  kept.restore();
  x.narrow(0, 1, 2).mul_(3);  // as a piece does
  CHECK_THROWS_WITH(kept.restore(), Catch::Contains("(tensor: x, shape: [4, 2]); change a copy"));
  CHECK_THROWS_AS(kept.restore(), c10::ValueError);
  kept.end();

  const auto now = x.clone();
  const auto version = y._version();
  kept.begin({{"x", x}, {"y", y}});
  CHECK(used_bytes() >= before + static_cast<int64_t>(x.nbytes()));
  for (int attempt = 0; attempt < 2; ++attempt) {
    x.zero_();
    kept.restore();
    CHECK(at::equal(x, now));
  }
  CHECK(y._version() == version);
  y.add_(1);
  CHECK_THROWS_WITH(kept.restore(), Catch::Contains("(tensor: y"));
  kept.end();

  kept.begin({{"a", x}, {"b", x}, {"c", y}});  // of another form: any of them may change
  y.zero_();
  kept.restore();
  CHECK(y[3].item<double>() == 4);
  kept.end();
}

TEST_CASE("Copies of all find what no version counter shows, and NaN is no change", "[step]") {
  const auto x = at::tensor({1., std::numeric_limits<double>::quiet_NaN()});
  const auto y = at::ones({2});
  const auto z = at::ones({1}).expand({3});
  KeptBatch kept;
  kept.begin({{"x", x}, {"y", y}, {"z", z}}, Copies::all);
  const auto version = x._version();
  y.variable_data().fill_(5);
  kept.restore();
  CHECK(at::equal(y, at::ones({2})));
  CHECK(x._version() == version);
  x.fill_(0);
  kept.restore();
  CHECK(std::isnan(x[1].item<double>()));

  KeptBatch whole;  // of which `kept` had a part
  whole.begin({{"x", x}, {"y", y}, {"z", z}});
  x.fill_(2);
  kept.restore();
  whole.learn(kept);
  whole.restore();
  x.fill_(3);
  whole.restore();
  CHECK(x[0].item<double>() == 1);
}

TEST_CASE("A graph that work leaves in a tensor is gone when it is restored", "[step]") {
  const auto x = at::ones({2});
  const auto leaf = at::ones({2}).requires_grad_();
  const auto weight = at::full({}, 2.).requires_grad_();
  KeptBatch kept;
  kept.begin({{"x", x.narrow(0, 0, 1)}, {"leaf", leaf}}, Copies::all);
  x.narrow(0, 0, 1).mul_(weight);
  CHECK(x.requires_grad());
  kept.restore();
  CHECK_FALSE(x.requires_grad());
  CHECK(at::equal(x, at::ones({2})));
  CHECK(leaf.requires_grad());
  CHECK(leaf.is_leaf());
}

}  // namespace test_kept_batch
