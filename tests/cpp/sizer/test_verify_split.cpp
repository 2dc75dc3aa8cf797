#include <ATen/ATen.h>
#include "support/catch.h"
#include "support/sizer_test.h"

#include <brimful/sizer/verify_split.h>

#include <cmath>
#include <limits>

namespace test_verify_split {

using namespace brimful;
using namespace brimful::test;

namespace {
constexpr int64_t kRows = 8;
using Pair = std::pair<at::Tensor, at::Tensor>;

Pair batch() {
  return {filled({kRows, Net::kInputs}, 2), filled({kRows, 1}, 7)};
}

auto mean_loss_of(Net& net) {
  return [&net](const Pair& piece) { return at::mse_loss(net.forward(piece.first), piece.second); };
}
}  // namespace

TEST_CASE("A model that keeps rows apart is equal split and unsplit", "[sizer][verify]") {
  Net net(false);
  VerifyOptions options;
  options.pieces = GENERATE(2, 3, 8);
  const auto check = verify_split(net, batch(), mean_loss_of(net), options);
  CHECK(check.equal);
  CHECK(check.loss_difference < 1e-6);
  CHECK(check.gradient_difference < 1e-5);
  CHECK_FALSE(check.drew_random);
  CHECK(check.rtol == std::sqrt(double{std::numeric_limits<float>::epsilon()}));
}

TEST_CASE("BatchNorm and a loss over the batch differ, with the parameter", "[sizer][verify]") {
  Net norm(true);
  const auto check = verify_split(norm, batch(), mean_loss_of(norm));
  CHECK_FALSE(check.equal);
  CHECK(check.gradient_difference > 0.01);
  CHECK_FALSE(check.worst_parameter.empty());

  Net net(false);
  const auto loss = verify_split(
      net, batch(), [&](const Pair& piece) { return net.forward(piece.first).sum().square(); });
  CHECK_FALSE(loss.equal);
  CHECK(loss.loss_difference > 0.01);
}

TEST_CASE("The difference is named by the parameter that has it", "[sizer][verify]") {
  Net net(false);
  const auto& bias = net.named_parameters()[3];
  const auto check = verify_split(net, batch(), [&](const Pair& piece) {
    const double rows = static_cast<double>(piece.first.size(0));
    return mean_loss_of(net)(piece) + bias.value().sum() * rows;
  });
  CHECK_FALSE(check.equal);
  CHECK(check.worst_parameter == bias.key());
}

TEST_CASE("A piece's weight counts as it does in a step", "[sizer][verify]") {
  Net net(false);
  const auto weighted = [&](const Pair& piece) {
    const auto weights = at::arange(1, piece.first.size(0) + 1, at::kFloat).unsqueeze(1);
    const auto total = weights.sum();
    const auto squares = (net.forward(piece.first) - piece.second).square();
    return std::pair((squares * weights).sum() / total, total.item<double>());
  };
  // The weights are those of rows in their piece, and so differ with the split.
  CHECK_FALSE(verify_split(net, batch(), [&](const Pair& piece) {
                const auto [loss, weight] = weighted(piece);
                return PieceLoss{loss, weight};
              }).equal);
  const auto by_target = [&](const Pair& piece) {
    const auto weights = piece.second.abs() + 1;
    const auto squares = (net.forward(piece.first) - piece.second).square();
    return PieceLoss{(squares * weights).sum() / weights.sum(), weights.sum().item<double>()};
  };
  CHECK(verify_split(net, batch(), by_target).equal);
  CHECK_FALSE(
      verify_split(net, batch(), [&](const Pair& piece) { return by_target(piece).loss; }).equal);
}

TEST_CASE("Buffers, gradients and random numbers are left as they were", "[sizer][verify]") {
  Net net(true);
  auto& kept = net.named_parameters()[0].value().mutable_grad();
  kept = at::ones({6, Net::kInputs});
  const auto gradient = kept;
  const auto generator = at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
  const auto numbers = generator.get_state();
  const auto buffers = copies(net.buffers());
  bool fails = false;
  const auto noisy = [&](const Pair& piece) {
    TORCH_CHECK(!fails || piece.first.size(0) == kRows, "planted");
    return mean_loss_of(net)({at::dropout(piece.first, 0.5, true), piece.second});
  };
  CHECK(verify_split(net, batch(), noisy).drew_random);
  fails = true;
  CHECK(catching([&] { verify_split(net, batch(), noisy); }).text == "planted");
  CHECK(same_bits(net.buffers(), buffers));
  CHECK(at::equal(generator.get_state(), numbers));
  CHECK(net.named_parameters()[0].value().grad().is_same(gradient));
  CHECK(at::equal(gradient, at::ones({6, Net::kInputs})));
  CHECK_FALSE(net.named_parameters()[1].value().grad().defined());
}

TEST_CASE("Bad input of verify_split is refused", "[sizer][verify][bad input]") {
  Net net(false);
  const auto with = [&](int64_t pieces, std::optional<double> rtol) {
    return catching([&] {
      verify_split(net, batch(), mean_loss_of(net),
                   {pieces, rtol, c10::Device(c10::DeviceType::CPU)});
    });
  };
  CHECK_THAT(with(1, {}).text, Catch::Contains("(pieces: 1)"));
  CHECK_THAT(with(9, {}).text, Catch::Contains("(rows: 8, pieces: 9)"));
  CHECK_THAT(with(2, -1).text, Catch::Contains("(rtol: -1)"));
  for (const auto& parameter : net.named_parameters()) {
    parameter.value().requires_grad_(false);
  }
  CHECK(with(2, {}).type == Type::value_error);
  CHECK_THAT(with(2, {}).text, Catch::Contains("(parameters: 6)"));
}

}  // namespace test_verify_split
