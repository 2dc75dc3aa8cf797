// Steps over pairs of rows: the gradient is that of the batch in one piece, whatever the split and the ranks.
#include "support/sizer_test.h"

#include <brimful/memory/fault.h>
#include <brimful/sizer/batch_sizer.h>
#include <c10/util/ScopeExit.h>

namespace test_pairs {

using namespace brimful;
using namespace brimful::test;

namespace {

std::shared_ptr<Net> exact_net() {
  return std::make_shared<Net>(false, at::kDouble);
}

at::Tensor contrast(const at::Tensor& embeddings) {
  const auto scores = at::matmul(embeddings, embeddings.t()).tanh();
  return at::cross_entropy_loss(scores, at::arange(scores.size(0)));
}

std::vector<at::Tensor> reference_of(const at::Tensor& data) {
  const auto net = exact_net();
  contrast(net->forward(data)).backward();
  return net->gradients();
}

bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() && y.defined() && at::allclose(x, y, 1e-12, 1e-14);
  });
}
}  // namespace

TEST_CASE("A step over pairs has the gradient of the whole batch", "[sizer][pairs]") {
  const Quiet quiet;
  const int world_size = GENERATE(1, 2, 3);
  const bool own = GENERATE(false, true);
  const Watchdog watchdog("a step over pairs");
  Checks checks;
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world_size; ++rank) {
    all.push_back(batch_of(rank, 0, 4 + rank, at::kDouble).data);
  }
  const auto reference = reference_of(at::cat(all));
  run_ranks({world_size}, [&](int rank, const Group& group) {
    BatchSizerOptions options;
    options.pieces = 3;
    Trainer trainer(group, exact_net(), options);
    const auto data = batch_of(rank, 0, 4 + rank, at::kDouble).data;
    const auto embed = [&](const at::Tensor& piece) { return trainer.model(piece); };
    const auto whole = [](const Towers& towers) { return contrast(towers[0]); };
    const auto rows = [](const Towers& towers, OwnRows mine) {
      const auto scores =
          at::matmul(towers[0].slice(0, mine.begin, mine.end), towers[0].t()).tanh();
      return at::cross_entropy_loss(scores, at::arange(mine.begin, mine.end));
    };
    for (int repeat = 0; repeat < 2; ++repeat) {
      PairOptions pair_options;
      pair_options.own = own;
      const auto outcome = own ? trainer.sizer.step_pairs(data, embed, rows, pair_options)
                               : trainer.sizer.step_pairs(data, embed, whole);
      checks.expect(outcome.pieces == 3 && outcome.losses.size() == 1, "pieces or losses");
      checks.expect(close(trainer.model->gradients(), reference), "another gradient");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A shortage at any allocation of a step over pairs keeps its gradient or undoes it",
          "[sizer][pairs][faults]") {
  const Quiet quiet;
  const Watchdog watchdog("faults in a step over pairs");
  const auto data = batch_of(0, 0, 4, at::kDouble).data;
  const auto reference = reference_of(data);
  Checks checks;
  int64_t repeated = 0;
  run_ranks({1}, [&](int /*rank*/, const Group& group) {
    bool fired = true;
    for (int64_t index = 0; fired; ++index) {
      BatchSizerOptions options;
      options.pieces = 2;
      Trainer trainer(group, exact_net(), options);
      const auto caught = catching([&] {
        const memory::FaultAt fault(index);
        const auto note = c10::make_scope_exit([&] { fired = fault.fired(); });
        const auto outcome = trainer.sizer.step_pairs(
            data, [&](const at::Tensor& piece) { return trainer.model(piece); },
            [](const Towers& towers) { return contrast(towers[0]); });
        repeated += outcome.retries;
      });
      const auto gradients = trainer.model->gradients();
      checks.expect(caught.type == Type::nothing
                        ? close(gradients, reference)
                        : std::none_of(gradients.begin(), gradients.end(),
                                       [](const auto& g) { return g.defined(); }),
                    "allocation " + std::to_string(index) + ": " + caught.text);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK(repeated > 20);
}

TEST_CASE("A rank that cannot embed its rows ends the step of all", "[sizer][pairs][faults]") {
  const Quiet quiet;
  const Watchdog watchdog("a rank that cannot embed its rows");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, exact_net());
    const auto data = batch_of(rank, 0, 4, at::kDouble).data;
    const auto caught = catching([&] {
      trainer.sizer.step_pairs(
          data,
          [&](const at::Tensor& piece) {
            return rank == 1 ? trainer.model(piece).slice(0, 0, 1) : trainer.model(piece);
          },
          [](const Towers& towers) { return contrast(towers[0]); });
    });
    checks.expect(caught.type == (rank == 1 ? Type::value_error : Type::rank_failed), caught.text);
    checks.expect(caught.text.find("another number of rows") != std::string::npos, caught.text);
    checks.expect(caught.seconds < 5, "took long");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_pairs
