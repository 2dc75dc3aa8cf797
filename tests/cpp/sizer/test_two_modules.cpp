// Two wrapped modules in one step, as a GAN has them: the verdict is the worst over both.
#include "support/sizer_test.h"

namespace test_two_modules {

using namespace brimful;
using namespace brimful::test;

namespace {

constexpr int64_t kRows = 8;
constexpr int kParameters = 6;  // of each module

struct Gan {
  explicit Gan(const Group& group)
      : generator(std::make_shared<Net>(false, at::kDouble, 0, Net::kInputs), group,
                  tiny_buckets()),
        critic(std::make_shared<Net>(false, at::kDouble, 3), group, tiny_buckets()),
        sizer(StepGroup({generator.reducer(), critic.reducer()}, {}), Transaction({}, {})) {}

  Outcome step(int rank, int64_t number, std::optional<std::vector<int64_t>> split = {}) {
    const auto batch = batch_of(rank, number, kRows, at::kDouble);
    const auto input = input_of(kRows, std::move(split));
    auto outcome = sizer.step(
        input,
        {[&](int64_t begin, int64_t end) {
           generator->fault->current_piece = critic->fault->current_piece = static_cast<int>(begin);
           const auto made = generator(slice_rows(batch.data, begin, end));
           const auto target = slice_rows(batch.target, begin, end);
           return PieceLoss{at::mse_loss(critic(made), target), static_cast<double>(end - begin)};
         },
         run_backward});
    generator->update();
    critic->update();
    return outcome;
  }
  std::vector<at::Tensor> state() {
    auto tensors = generator->parameters();
    const auto more = critic->parameters();
    tensors.insert(tensors.end(), more.begin(), more.end());
    return copies(tensors);
  }

  DistributedDataParallel<Net> generator;
  DistributedDataParallel<Net> critic;
  BatchSizer sizer;
};

}  // namespace

TEST_CASE("Two modules in one step share its verdict wherever one fails",
          "[sizer][reducer][faults]") {
  const Quiet quiet;
  const int world_size = GENERATE(2, 3);
  const Watchdog watchdog("two modules in one step");
  Checks checks;
  std::vector<std::vector<std::vector<at::Tensor>>> states(world_size);
  run_ranks({world_size}, [&](int rank, const Group& group) {
    for (const bool in_critic : {false, true}) {
      for (const auto kind : {Fault::Kind::out_of_memory, Fault::Kind::error}) {
        for (int parameter = 0; parameter < kParameters; ++parameter) {
          const auto name = std::string(in_critic ? "critic " : "generator ") +
                            std::to_string(parameter) + ", rank " + std::to_string(rank) + ": ";
          Gan gan(group);
          gan.step(rank, 0);
          const auto before = gan.state();
          auto& fault = *(in_critic ? gan.critic : gan.generator)->fault;
          fault.at = Fault::At::gradient;
          fault.parameter = parameter;
          fault.kind = kind;
          fault.armed = rank == 1;
          Outcome outcome;
          const auto caught = catching([&] { outcome = gan.step(rank, 1); });
          if (kind == Fault::Kind::out_of_memory) {
            checks.expect(caught.type == Type::nothing, name + caught.text);
            Gan again(group);
            again.step(rank, 0);
            again.step(rank, 1, outcome.split);
            checks.expect(same_bits(gan.state(), again.state()),
                          name + "a replay of the split differs");
          } else {
            checks.expect(caught.type == (rank == 1 ? Type::runtime_error : Type::rank_failed),
                          name + caught.text);
            checks.expect(same_bits(before, gan.state()), name + "the failed step left a trace");
          }
          const auto after = catching([&] { gan.step(rank, 2); });
          checks.expect(after.type == Type::nothing, name + "the next step raised: " + after.text);
          states[rank].push_back(gan.state());
        }
      }
    }
  });
  for (const auto& of_rank : states) {
    for (size_t i = 0; i < states[0].size(); ++i) {
      checks.expect(same_bits(of_rank.at(i), states[0][i]),
                    "the replicas differ in case " + std::to_string(i));
    }
  }
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Two modules in one step have the gradients that they have in one process",
          "[sizer][reducer]") {
  const Watchdog watchdog("two modules in one step, exactly");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Gan gan(group);
    const auto start = gan.state();
    gan.step(rank, 0, Split{3, 5});
    Net generator(false, at::kDouble, 0, Net::kInputs);
    Net critic(false, at::kDouble, 3);
    const auto a = batch_of(0, 0, kRows, at::kDouble);
    const auto b = batch_of(1, 0, kRows, at::kDouble);
    at::mse_loss(critic.forward(generator.forward(at::cat({a.data, b.data}))),
                 at::cat({a.target, b.target}))
        .backward();
    generator.update();
    critic.update();
    auto expected = generator.parameters();
    const auto more = critic.parameters();
    expected.insert(expected.end(), more.begin(), more.end());
    const auto state = gan.state();
    for (size_t i = 0; i < state.size(); ++i) {
      checks.expect(at::allclose(state[i], expected[i], 1e-12, 1e-14),
                    "parameter " + std::to_string(i));
      checks.expect(!at::equal(state[i], start[i]),
                    "parameter " + std::to_string(i) + " did not move");
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_two_modules
