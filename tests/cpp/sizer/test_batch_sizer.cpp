#include "support/sizer_test.h"

#include <limits>
#include <numeric>

namespace test_batch_sizer {

using namespace brimful;
using namespace brimful::test;

namespace {

double tolerance(c10::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : 1e-6;
}

/// Largest difference relative to the largest element of `b`.
double distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!a.at(i).defined()) {
      return std::numeric_limits<double>::infinity();
    }
    difference = std::max(difference,
                          (a[i].to(at::kDouble) - b[i].to(at::kDouble)).abs().max().item<double>());
    size = std::max(size, b[i].abs().max().item<double>());
  }
  return difference / size;
}

/// One weight a row. Its mean over a piece is what a token-weighted loss with ignored tokens is.
at::Tensor row_weights(int rank, int64_t rows, c10::ScalarType dtype) {
  auto weights = at::arange(rows, at::kDouble).add(rank).remainder(4);  // 0, 1, 2, 3
  return weights.to(dtype);
}

PieceWork weighted_work(Trainer& trainer, const Batch& batch, const at::Tensor& weights) {
  return {[&trainer, batch, weights](int64_t begin, int64_t end) {
            const auto w = slice_rows(weights, begin, end);
            const auto out = trainer.model(slice_rows(batch.data, begin, end));
            const auto error = (out - slice_rows(batch.target, begin, end)).square().squeeze(1);
            const double sum = w.sum().item<double>();
            return PieceLoss{(error * w).sum() / sum, sum};  // NaN where the sum is 0
          },
          run_backward};
}

struct Reference {
  std::vector<at::Tensor> gradients;
  double loss = 0;
  double weight = 0;
};

Reference weighted_reference(const std::vector<Batch>& batches,
                             const std::vector<at::Tensor>& weights) {
  Net net(false, at::kDouble);
  Reference reference;
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < batches.size(); ++i) {
    const auto out = net.forward(batches[i].data.to(at::kDouble));
    const auto w = weights[i].to(at::kDouble);
    sum = sum + ((out - batches[i].target.to(at::kDouble)).square().squeeze(1) * w).sum();
    reference.weight += w.sum().item<double>();
  }
  const auto loss = sum / reference.weight;
  loss.backward();
  reference.loss = loss.item<double>();
  reference.gradients = net.gradients();
  return reference;
}

std::shared_ptr<Net> net_of(c10::ScalarType dtype) {
  return std::make_shared<Net>(false, dtype);
}

}  // namespace

TEST_CASE("Uneven batches and pieces give the exact weighted mean", "[sizer]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble);
  const auto splits =
      GENERATE(std::vector<Split>{{7}, {2}}, std::vector<Split>{{1, 5, 1}, {2}},
               std::vector<Split>{{3, 4}, {1, 1}, {9, 2, 2}}, std::vector<Split>{{5, 3}});
  const auto world_size = static_cast<int>(splits.size());
  const Watchdog watchdog("the exact weighted mean");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    Trainer trainer(group, net_of(dtype));
    for (int step = 0; step < 3; ++step) {  // the later ones know no exact total beforehand
      std::vector<Batch> batches;
      std::vector<at::Tensor> weights;
      for (int other = 0; other < world_size; ++other) {
        const auto& split = splits[other];
        const int64_t rows = std::accumulate(split.begin(), split.end(), int64_t{0}) + step;
        batches.push_back(batch_of(other, step, rows, dtype));
        weights.push_back(at::ones({rows}, dtype));
      }
      auto split = splits[rank];
      split.back() += step;
      const auto outcome = trainer.fill(batches[rank], split);
      const auto expected = weighted_reference(batches, weights);
      const auto name = "step " + std::to_string(step) + ", rank " + std::to_string(rank) + ": ";
      const double off = distance(trainer.model->gradients(), expected.gradients);
      checks.expect(off < tolerance(dtype),
                    name + "gradients are off by " + std::to_string(off * 1e12) + "e-12");
      checks.expect(std::abs(outcome.loss - expected.loss) < tolerance(dtype), name + "loss");
      checks.expect(outcome.weight == expected.weight, name + "weight");
      checks.expect(outcome.split == split, name + "split");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Explicit weights give the weighted mean, pieces and ranks of weight 0 included",
          "[sizer]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble);
  const int silent = GENERATE(-1, 0, 1);  // whose weights are all 0
  const Watchdog watchdog("explicit weights");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, net_of(dtype));
    for (const auto& split :
         {Split{10}, Split{1, 4, 5}, Split{4, 5, 1}}) {  // row 0 of rank 0 weighs 0, row 9 1
      std::vector<Batch> batches;
      std::vector<at::Tensor> weights;
      for (const int other : {0, 1}) {
        batches.push_back(batch_of(other, 0, 10, dtype));
        weights.push_back(row_weights(other, 10, dtype));
        if (other == 0) {
          weights.back()[9] = 0;  // its last piece weighs nothing, too
        }
        if (other == silent) {
          weights.back().zero_();
        }
      }
      const auto input = input_of(10, split);
      const auto outcome =
          trainer.sizer.step(input, weighted_work(trainer, batches[rank], weights[rank]));
      const auto expected = weighted_reference(batches, weights);
      const auto name =
          std::to_string(split.size()) + " pieces, rank " + std::to_string(rank) + ": ";
      const double off = distance(trainer.model->gradients(), expected.gradients);
      checks.expect(off < tolerance(dtype),
                    name + "gradients are off by " + std::to_string(off * 1e12) + "e-12");
      checks.expect(std::abs(outcome.loss - expected.loss) < tolerance(dtype), name + "loss");
      checks.expect(outcome.weight == expected.weight, name + "weight");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A step whose weights are all 0 fails on all ranks, and leaves nothing", "[sizer]") {
  const Watchdog watchdog("all weights 0");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, net_of(at::kDouble));
    for (int step = 0; step < 2; ++step) {
      const auto input = input_of(4, Split{2, 2});
      const auto batch = batch_of(rank, 0, 4, at::kDouble);
      const auto before = trainer.state();
      const auto caught = catching([&] {
        trainer.sizer.step(input, weighted_work(trainer, batch, at::zeros({4}, at::kDouble)));
      });
      checks.expect(caught.type == Type::value_error, caught.text);
      checks.expect(caught.text.find("sum to 0") != std::string::npos, caught.text);
      checks.expect(same_bits(before, trainer.state()), "a parameter or a buffer has changed");
      for (const auto& gradient : trainer.model->gradients()) {
        checks.expect(!gradient.defined(), "a gradient is left");
      }
    }
    const auto after = trainer.fill(batch_of(rank, 1, 4, at::kDouble));
    checks.expect(after.weight == 8, "the next step's weight");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A parameter that only the first piece uses keeps its gradient", "[sizer]") {
  const Watchdog watchdog("a parameter used in the first piece only");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, net_of(at::kDouble));
    const auto& net = trainer.model;
    const auto bias =
        net.module()->parameters()[1];  // leaves behind third.*, which every piece uses
    const auto used = net.module()->parameters()[5];
    PieceWork work{[&](int64_t begin, int64_t end) {
                     auto loss = used.sum() * 2;
                     loss = begin == 0 && rank == 1 ? loss + bias.sum() * 3 : loss;
                     return PieceLoss{loss, static_cast<double>(end - begin)};
                   },
                   run_backward};
    const auto input = input_of(4, Split{1, 3});
    for (int step = 0; step < 2; ++step) {
      trainer.sizer.step(input, work);
      checks.expect(at::allclose(bias.grad(), at::full_like(bias, 3.0 / 8), 1e-12),
                    "first piece's gradient");
      checks.expect(at::allclose(used.grad(), at::full_like(used, 2.0), 1e-12),
                    "both pieces' gradient");
      checks.expect(!net.module()->parameters()[0].grad().defined(),
                    "unused on all ranks, but there");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("One process without a group splits and retries too", "[sizer]") {
  const Quiet quiet;
  const auto net = std::make_shared<Net>(false, at::kDouble);
  BatchSizer sizer(StepGroup({}, net->parameters()), Transaction({}, {}), {});
  const auto batch = batch_of(0, 0, 8, at::kDouble);
  const auto expected = weighted_reference({batch}, {at::ones({8}, at::kDouble)});
  bool fail = true;
  const PieceWork work{[&](int64_t begin, int64_t end) {
                         TORCH_CHECK_WITH(OutOfMemoryError, !fail || end - begin <= 2, "planted");
                         const auto out = net->forward(slice_rows(batch.data, begin, end));
                         return PieceLoss{at::mse_loss(out, slice_rows(batch.target, begin, end)),
                                          static_cast<double>(end - begin)};
                       },
                       run_backward};
  const auto input = input_of(8);
  auto outcome = sizer.step(input, work);
  CHECK(outcome.retries == 2);
  CHECK(outcome.split == Split{2, 2, 2, 2});
  CHECK(outcome.loss == Approx(expected.loss).epsilon(1e-12));
  CHECK(distance(net->gradients(), expected.gradients) < 1e-12);
  net->update(0);
  outcome = sizer.step(input, work);
  CHECK(outcome.retries == 0);
  CHECK(outcome.pieces == 4);
}

}  // namespace test_batch_sizer
