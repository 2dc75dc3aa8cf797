#include "support/sizer_test.h"

#include <brimful/memory/fault.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/row_lengths.h>

#include <algorithm>
#include <numeric>

namespace test_by_length {

using namespace brimful;
using namespace brimful::test;

namespace {
/// Rows of these lengths, the longest first; the loss is the mean over all tokens.
struct Tokens {
  explicit Tokens(std::vector<int64_t> of) : lengths(std::move(of)) {
    weight = filled({4}, 1, at::kDouble).requires_grad_();
    const auto rows = std::ssize(lengths);
    values = filled({rows, lengths.front(), 4}, 2, at::kDouble);
    mask = at::zeros({rows, lengths.front()}, at::kDouble);
    for (int64_t row = 0; row < rows; ++row) {
      mask[row].narrow(0, 0, lengths[row]).fill_(1);
    }
  }

  PieceLoss loss(int64_t begin, int64_t end, int64_t length) const {
    const auto cut = [&](const at::Tensor& all) {
      return all.narrow(0, begin, end - begin).narrow(1, 0, length);
    };
    const auto counts = cut(mask);
    const double tokens = counts.sum().item<double>();
    const auto errors = at::matmul(cut(values), weight).tanh().square();
    return {(errors * counts).sum() / tokens, tokens};
  }

  PieceWork work() {
    return {[this](int64_t begin, int64_t end) {
              pieces.emplace_back(end - begin, lengths[begin]);
              return loss(begin, end, lengths[begin]);
            },
            [](const at::Tensor& of, const at::Tensor& gradient) { of.backward(gradient); }};
  }

  StepInput input() const {
    auto by_length = std::make_shared<RowLengths>();
    by_length->lengths = lengths;
    by_length->order.resize(lengths.size());
    std::iota(by_length->order.rbegin(), by_length->order.rend(), int64_t{0});
    StepInput input;
    input.rows = std::ssize(lengths);
    input.by_length = std::move(by_length);
    return input;
  }

  BatchSizer sizer(BatchSizerOptions options = {}) const {
    return {StepGroup({}, {weight}), Transaction({}, {at::kCPU}), std::move(options)};
  }

  std::vector<int64_t> lengths;
  at::Tensor weight;
  at::Tensor values;
  at::Tensor mask;
  std::vector<std::pair<int64_t, int64_t>> pieces;
};

BatchSizerOptions in_pieces(int64_t pieces) {
  BatchSizerOptions options;
  options.pieces = pieces;
  return options;
}

at::Tensor expected_gradient(const Tokens& tokens) {
  tokens.loss(0, std::ssize(tokens.lengths), tokens.lengths.front()).loss.backward();
  const auto gradient = tokens.weight.grad().clone();
  tokens.weight.mutable_grad() = at::Tensor();
  return gradient;
}
}  // namespace

TEST_CASE("A step by length is that of the padded batch", "[sizer][by_length]") {
  const Quiet quiet;
  Tokens tokens({90, 70, 70, 30, 12, 3, 3, 1});
  const auto expected = expected_gradient(tokens);
  auto sizer = tokens.sizer(in_pieces(3));
  const auto outcome = sizer.step(tokens.input(), tokens.work());
  CHECK(at::allclose(tokens.weight.grad(), expected, 1e-12, 1e-14));
  CHECK(outcome.weight == std::accumulate(tokens.lengths.begin(), tokens.lengths.end(), 0.0));
  CHECK(outcome.order.front() == 7);
  CHECK(outcome.split.size() == tokens.pieces.size());
  CHECK(outcome.split.size() >= 3);
  CHECK(tokens.pieces.front().second == 90);
}

TEST_CASE("A step by length survives an allocation that is refused anywhere",
          "[sizer][by_length][faults]") {
  const Quiet quiet;
  int64_t retries = 0;
  for (int64_t index = 0;; index += 3) {
    Tokens tokens({40, 31, 30, 20, 8, 8, 2});
    const auto expected = expected_gradient(tokens);
    auto sizer = tokens.sizer(in_pieces(2));
    auto input = tokens.input();
    const auto work = tokens.work();
    bool fired = false;
    Outcome outcome;
    {
      const memory::FaultAt fault(index);
      outcome = sizer.step(input, work);
      fired = fault.fired();
    }
    retries += outcome.retries;
    const auto gradient = tokens.weight.grad().clone();
    CHECK(at::allclose(gradient, expected, 1e-12, 1e-14));
    tokens.weight.mutable_grad() = at::Tensor();
    input.split = outcome.split;
    auto again = tokens.sizer();
    again.step(input, work);
    CHECK(at::equal(tokens.weight.grad(), gradient));
    if (!fired) {
      break;
    }
  }
  CHECK(retries > 3);
}

TEST_CASE("Lockstep and rows by length do not go together", "[sizer][by_length]") {
  Tokens tokens({4, 2});
  BatchSizerOptions options;
  options.lockstep = true;
  auto sizer = tokens.sizer(options);
  CHECK_THROWS_AS(sizer.step(tokens.input(), tokens.work()), c10::ValueError);
}

TEST_CASE("A sizer's state has the tokens that fit", "[sizer][by_length]") {
  const Quiet quiet;
  Tokens tokens({40, 31, 30, 20});
  auto sizer = tokens.sizer();
  {
    const memory::FaultAt fault(2);
    CHECK(sizer.step(tokens.input(), tokens.work()).retries == 1);
  }
  const auto state = sizer.state();
  CHECK(state.at("piece_tokens") == 80);
  CHECK(state.at("piece_rows") == 0);
  tokens.weight.mutable_grad() = at::Tensor();
  auto resumed = tokens.sizer();
  resumed.load_state(state);
  CHECK(resumed.state().at("piece_tokens") == 80);
  CHECK(resumed.step(tokens.input(), tokens.work()).split.size() >= 2);
}

}  // namespace test_by_length
