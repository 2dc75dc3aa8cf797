#include <ATen/ATen.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <brimful/probes/op_ring.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <string>
#include <thread>
#include <vector>
#include "support/catch.h"

namespace test_op_ring {

using namespace brimful::probes;

namespace {

struct Armed {
  explicit Armed(OpSite site = nullptr) { start_op_ring(std::move(site)); }
  ~Armed() {
    stop_op_ring();
    clear_op_ring();
  }
  Armed(const Armed&) = delete;
  Armed& operator=(const Armed&) = delete;
};

at::Tensor indices(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

std::vector<std::string> findings() {
  std::vector<std::string> words;
  for (const auto& finding : op_ring_index_findings()) {
    words.push_back(to_string(finding));
  }
  return words;
}

}  // namespace

TEST_CASE("The ring keeps the last 256 operators with their inputs and places", "[probes]") {
  const auto a = at::ones({2, 3});
  const Armed armed([] { return std::string("train.py:31 in forward"); });
  for (int i = 0; i < 400; ++i) {
    at::add(a, a);
  }
  at::mul(a, a.t().contiguous().t());
  const auto records = op_ring_records();
  CHECK(records.size() == 256);
  CHECK(records.back().name == "aten::mul");
  CHECK(records.back().where == "train.py:31 in forward");
  REQUIRE(records.back().tensors.size() == 2);
  CHECK(records.back().tensors[0] == "Float[2, 3] cpu");
  CHECK_FALSE(records.back().free_bytes);
}

TEST_CASE("The ring has the bytes of what a library is called with", "[probes]") {
  const Armed armed;
  at::mm(at::ones({2, 3}), at::ones({3, 5}, at::kFloat));
  const auto records = op_ring_records();
  const auto mm = std::find_if(records.begin(), records.end(),
                               [](const auto& record) { return record.name == "aten::mm"; });
  REQUIRE(mm != records.end());
  CHECK(mm->input_bytes == (2 * 3 + 3 * 5) * 4);
  CHECK_FALSE(records.front().input_bytes);  // of what uses none
}

TEST_CASE("The ring records while it is on, once", "[probes]") {
  CHECK_FALSE(op_ring_is_on());
  {
    const Armed armed;
    CHECK(op_ring_is_on());
    CHECK_THROWS_AS(start_op_ring(), c10::ValueError);
    at::ones({1});
    stop_op_ring();
    stop_op_ring();
    const auto kept = op_ring_records().size();
    CHECK(kept > 0);
    at::ones({1});
    CHECK(op_ring_records().size() == kept);
  }
  CHECK(op_ring_records().empty());
}

TEST_CASE("A backward node has its forward's place", "[probes]") {
  const auto x = at::ones({4}).requires_grad_();
  int line = 0;
  const Armed armed([&] { return "train.py:" + std::to_string(++line); });
  const auto loss = at::exp(x).sum();
  std::string forward;
  for (const auto& record : op_ring_records()) {
    forward = record.name == "aten::exp" ? record.where : forward;
  }
  loss.backward();
  const auto records = op_ring_records();
  const auto node = std::find_if(records.begin(), records.end(), [](const auto& record) {
    return record.backward && record.name.find("ExpBackward") != std::string::npos;
  });
  REQUIRE(node != records.end());
  CHECK(node->where == forward);
}

TEST_CASE("Indices out of range are found, whatever operator took them", "[probes]") {
  const auto table = at::ones({10, 4});
  const Armed armed;
  CHECK_THROWS(at::embedding(table, indices({1, 10})));
  CHECK(findings() == std::vector<std::string>{"aten::embedding got index 10, allowed are 0 to 9"});
  clear_op_ring();
  CHECK_THROWS(at::index_select(table, 1, indices({0, -2})));
  CHECK(findings() ==
        std::vector<std::string>{"aten::index_select got index -2, allowed are 0 to 3"});
  clear_op_ring();
  CHECK_THROWS(at::gather(table, 0, indices({11}).reshape({1, 1})));
  CHECK(findings() == std::vector<std::string>{"aten::gather got index 11, allowed are 0 to 9"});
  clear_op_ring();
  CHECK_THROWS(at::scatter(table, 1, indices({4}).reshape({1, 1}), 1.0));
  CHECK(findings() == std::vector<std::string>{"aten::scatter got index 4, allowed are 0 to 3"});
  clear_op_ring();
  CHECK_THROWS(at::cross_entropy_loss(table, indices({0, 1, 2, 3, 4, 0, 0, 0, 0, 0})));
  CHECK(findings() ==
        std::vector<std::string>{"aten::cross_entropy_loss got index 4, allowed are 0 to 3"});
  clear_op_ring();
  CHECK_THROWS(table.index({indices({-11})}));
  CHECK(findings() == std::vector<std::string>{"aten::index got index -11, allowed are -10 to 9"});
}

TEST_CASE("Indices that are right, or stand for none, are no finding", "[probes]") {
  const auto table = at::ones({10, 4});
  const Armed armed;
  at::embedding(table, indices({0, 9}));
  table.index({indices({-10, 9})});
  table.index({table.select(1, 0) > 0});  // a mask
  at::cross_entropy_loss(table, indices({0, 1, 2, 3, -100, 0, 0, 0, 0, 0}));
  at::cross_entropy_loss(table, at::ones({10, 4}));  // probabilities
  at::embedding(table, at::empty({0}, at::kLong));
  CHECK(findings().empty());
}

TEST_CASE("Long indices are read later, while their tensor lives", "[probes]") {
  const auto table = at::ones({10, 4});
  auto index = at::zeros({5000}, at::kLong);
  index.select(0, 4321).fill_(12);
  const Armed armed;
  CHECK_THROWS(at::embedding(table, index));
  CHECK(findings() == std::vector<std::string>{"aten::embedding got index 12, allowed are 0 to 9"});
  index.reset();
  CHECK(findings().empty());
}

TEST_CASE("Several threads record at the same time", "[probes]") {
  const Armed armed;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      const auto table = at::ones({10, 4});
      for (int n = 0; n < 300; ++n) {
        at::embedding(table, at::zeros({3}, at::kLong));
      }
    });
  }
  for (int n = 0; n < 50; ++n) {
    op_ring_records();
    findings();
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(op_ring_records().size() == 256);
}

}  // namespace test_op_ring
