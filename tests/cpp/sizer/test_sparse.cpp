// A model whose last gradient is sparse: its bucket is launched first or early, and the record rides in a dense one.
#include "support/sizer_test.h"

namespace test_sparse {

using namespace brimful;
using namespace brimful::test;

namespace {

constexpr int64_t kRows = 4;

/// An embedding, and a linear layer behind it.
struct SparseModel {
  explicit SparseModel(const Group& group, bool dense = true) {
    table.set_requires_grad(true);
    head.set_requires_grad(true);
    std::vector<at::Tensor> parameters{table};
    ReducerOptions options;
    options.bucket_cap_mb = options.first_bucket_cap_mb = 1e-6;
    options.sparse = {true};
    if (dense) {
      parameters.push_back(head);
    }
    reducer = Reducer::create(parameters, {}, group, options);
    for (const auto& parameter : parameters) {
      const int k = static_cast<int>(&parameter - parameters.data());
      parameter.register_hook(
          [this, k](const at::Tensor&) { fault.reached(Fault::At::gradient, k); });
    }
  }

  at::Tensor loss(const at::Tensor& words) const {
    const auto features = at::embedding(table, words, -1, false, true);
    return (reducer->parameters().size() == 1 ? features : at::matmul(features, head))
        .square()
        .sum(1)
        .mean();
  }

  at::Tensor table = filled({6, 3}, 1, at::kDouble);
  at::Tensor head = filled({3, 2}, 2, at::kDouble);
  Fault fault;
  std::shared_ptr<Reducer> reducer;
};

at::Tensor words_of(int rank) {
  return at::arange(rank, rank + kRows, at::kLong).remainder(5);
}

}  // namespace

TEST_CASE("A sparse gradient survives every failure and stays the exact mean",
          "[sizer][reducer][faults]") {
  const Quiet quiet;
  const bool dense = GENERATE(true, false);
  const Watchdog watchdog("sparse gradients and failures");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    auto table = filled({6, 3}, 1, at::kDouble).set_requires_grad(true);
    const auto head = filled({3, 2}, 2, at::kDouble);
    const auto features = at::embedding(table, at::cat({words_of(0), words_of(1)}));
    (dense ? at::matmul(features, head) : features).square().sum(1).mean().backward();
    for (const auto kind : {Fault::Kind::out_of_memory, Fault::Kind::error}) {
      for (int parameter = 0; parameter < (dense ? 2 : 1); ++parameter) {
        SparseModel model(group, dense);
        BatchSizer sizer(StepGroup({model.reducer}, {}), Transaction({}, {}));
        const auto step = [&] {
          const auto input = input_of(kRows);
          return sizer.step(input, {[&](int64_t begin, int64_t end) {
                                      return PieceLoss{
                                          model.loss(words_of(rank).slice(0, begin, end)),
                                          double(end - begin)};
                                    },
                                    [](const at::Tensor& loss, const at::Tensor& gradient) {
                                      loss.backward(gradient);
                                    }});
        };
        model.fault.at = Fault::At::gradient;
        model.fault.parameter = parameter;
        model.fault.kind = kind;
        model.fault.armed = rank == 1;
        const auto name =
            "parameter " + std::to_string(parameter) + ", rank " + std::to_string(rank) + ": ";
        const auto caught = catching([&] { step(); });
        if (kind == Fault::Kind::error) {
          checks.expect(
              caught.type == (rank == 1 ? Caught::Type::runtime_error : Caught::Type::rank_failed),
              name + caught.text);
          step();
        } else {
          checks.expect(caught.type == Caught::Type::nothing, name + caught.text);
        }
        const auto& gradient = model.table.grad();
        checks.expect(gradient.defined() && gradient.is_sparse(), name + "not sparse");
        checks.expect(at::allclose(gradient.to_dense(), table.grad(), 1e-12, 1e-15),
                      name + "not the mean");
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_sparse
