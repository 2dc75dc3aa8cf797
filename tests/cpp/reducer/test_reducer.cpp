#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>
#include <brimful/memory/categories.h>
#include <brimful/step/control_record.h>

#include "reducer/at_exit.h"

namespace test_reducer {

using namespace brimful::test;
using brimful::DistributedDataParallel;
using brimful::PlanMismatch;
using brimful::Reducer;
using brimful::ReducerOptions;
using brimful::run_ranks;

namespace {

using Type = Caught::Type;
using Tensors = std::vector<at::Tensor>;

/// Whole numbers that any dtype holds, other ones on every rank.
at::Tensor coefficients(const at::Tensor& parameter, int rank) {
  const auto count = at::arange(parameter.numel(), at::kDouble).add(3 * rank).remainder(7);
  auto values = count.to(parameter.scalar_type());
  if (parameter.is_complex()) {
    values = values + at::complex(at::zeros_like(count), count + 1).to(parameter.scalar_type());
  }
  return values.reshape(parameter.sizes());
}

/// Its gradient by a parameter are that parameter's coefficients (conjugated).
at::Tensor linear_loss(const Tensors& parameters, int rank) {
  auto loss = at::zeros({}, at::kDouble);
  for (const auto& parameter : parameters) {
    const auto sum = (parameter * coefficients(parameter, rank)).sum();
    loss = loss + (sum.is_complex() ? at::real(sum) : sum).to(at::kDouble);
  }
  return loss;
}

at::Tensor mean_coefficients(const at::Tensor& parameter, int world_size) {
  auto sum = coefficients(parameter, 0);
  for (int rank = 1; rank < world_size; ++rank) {
    sum = sum + coefficients(parameter, rank);
  }
  sum = sum / world_size;
  return sum.is_complex() ? sum.conj().resolve_conj() : sum;
}

at::Tensor leaf(at::Tensor value) {
  return value.set_requires_grad(true);
}

ReducerOptions capped(double bytes) {
  ReducerOptions options;
  options.bucket_cap_mb = options.first_bucket_cap_mb = bytes / (1 << 20);
  return options;
}

void empty(const Tensors& parameters) {
  for (const auto& parameter : parameters) {
    parameter.mutable_grad().reset();
  }
}

}  // namespace

TEST_CASE("Gradients are the mean over ranks once backward returns", "[reducer]") {
  const int world_size = GENERATE(1, 2, 3);
  const double cap = GENERATE(1, 24, 1 << 20);
  const Watchdog watchdog("the mean over ranks");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    DistributedDataParallel<Net> model(std::make_shared<Net>(false, at::kDouble), group,
                                       capped(cap));
    for (int step = 0; step < 3; ++step) {
      Tensors expected;
      for (int other = 0; other < world_size; ++other) {
        Net net(false, at::kDouble);
        const auto batch = batch_of(other, step, 5, at::kDouble);
        at::mse_loss(net.forward(batch.data), batch.target).div(world_size).backward();
        const auto gradients = net.gradients();
        for (size_t i = 0; i < gradients.size(); ++i) {
          if (other == 0) {
            expected.push_back(gradients[i]);
          } else {
            expected[i] = expected[i] + gradients[i];
          }
        }
      }
      const auto batch = batch_of(rank, step, 5, at::kDouble);
      at::mse_loss(model(batch.data), batch.target).backward();
      const auto gradients = model->gradients();
      for (size_t i = 0; i < gradients.size(); ++i) {
        checks.expect(at::allclose(gradients[i], expected[i], 1e-12, 1e-15),
                      "parameter " + std::to_string(i));
      }
      model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("What a reducer takes for itself is communication, to the byte",
          "[reducer][categories]") {
  const bool wire = GENERATE(false, true);
  const Watchdog watchdog("a reducer's memory");
  Checks checks;
  brimful::memory::start_tracking();
  run_ranks({2}, [&](int, const Group& group) {
    auto options = capped(1);
    if (wire) {
      options.wire_dtype = at::kBFloat16;
    }
    const auto reducer =
        Reducer::create({leaf(at::zeros({64})), leaf(at::zeros({100}))}, {}, group, options);
    group->barrier()->wait();
    const auto found = brimful::memory::live_by_category();
    constexpr int64_t kTail = 2 + 2 * brimful::kRecordBytes;  // an element a parameter and a byte
    constexpr int64_t kAligned = 112;                         // the second parameter
    const int64_t floats = 64 + kAligned + kTail + kTail;     // what leaves has its own copy
    checks.expect(found[static_cast<size_t>(brimful::memory::Category::communication)] ==
                      2 * (4 * floats + (wire ? 2 * (64 + kAligned) : 0)),
                  "communication");
    group->barrier()->wait();
  });
  brimful::memory::stop_tracking();
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A reducer that dies leaves nothing behind", "[reducer]") {
  const Watchdog watchdog("reducers that die");
  Checks checks;
  run_ranks({1}, [&](int, const Group& group) {
    const auto before = brimful::registered_at_exit();
    for (int i = 0; i < 50; ++i) {
      auto reducer = Reducer::create({leaf(at::zeros({3}))}, {}, group);
      checks.expect(brimful::registered_at_exit() == before + 1, "one is alive");
      const std::weak_ptr<Reducer> watched = reducer;
      reducer.reset();
      checks.expect(watched.expired(), "nobody holds it");
    }
    checks.expect(brimful::registered_at_exit() == before, "all are forgotten");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Every dtype and layout is reduced as it is", "[reducer]") {
  const int world_size = GENERATE(1, 2);
  const double cap = GENERATE(1, 1000, 1 << 20);
  const Watchdog watchdog("dtypes and layouts");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    Tensors parameters{
        leaf(at::zeros({3}, at::kHalf)),
        leaf(at::zeros({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)),
        leaf(at::zeros({5}, at::kBFloat16)),
        leaf(at::zeros({4, 2}, at::kDouble).t()),
        leaf(at::zeros({2, 2}, at::kComplexFloat)),
        leaf(at::zeros({}, at::kFloat)),
        leaf(at::zeros({0, 3}, at::kFloat)),
        leaf(at::zeros({3}, at::kComplexDouble)),
    };
    std::rotate(parameters.begin(), parameters.begin() + static_cast<int64_t>(cap) % 5,
                parameters.end());
    const auto reducer = Reducer::create(parameters, {}, group, capped(cap));
    for (int step = 0; step < 2; ++step) {
      linear_loss(parameters, rank).backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& parameter = parameters[i];
        const auto& gradient = parameter.grad();
        const auto name =
            "parameter " + std::to_string(i) + " of " + c10::toString(parameter.scalar_type());
        checks.expect(gradient.defined() && gradient.scalar_type() == parameter.scalar_type(),
                      name + ": dtype");
        checks.expect(gradient.strides() == parameter.strides(), name + ": strides");
        checks.expect(at::equal(gradient, mean_coefficients(parameter, world_size)),
                      name + ": values");
      }
      empty(parameters);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Whether a backward synchronises is decided when it runs", "[reducer]") {
  const Watchdog watchdog("no_sync");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    DistributedDataParallel<Net> model(std::make_shared<Net>(false, at::kDouble), group,
                                       tiny_buckets());
    const auto parameters = model->parameters();
    const auto& reducer = *model.reducer();
    const auto batch = batch_of(rank, 0, 4, at::kDouble);
    const auto loss_of = [&](const at::Tensor& output) {
      return output.sum() * 0 + linear_loss(parameters, rank);
    };
    const auto grows = [&](bool before, bool at_backward) {
      model.reducer()->loop().set_sync(before);
      const auto loss = loss_of(model(batch.data));
      model.reducer()->loop().set_sync(at_backward);
      const auto launches = reducer.counters().launches;
      loss.backward();
      return reducer.counters().launches > launches;
    };
    for (int step = 0; step < 2; ++step) {
      checks.expect(!grows(true, false), "synchronised under no_sync");
      checks.expect(at::equal(parameters[0].grad(), coefficients(parameters[0], rank)),
                    "not the local gradient");
      checks.expect(!grows(false, false), "synchronised under no_sync");
      checks.expect(grows(false, true), "did not synchronise");
      for (const auto& parameter : parameters) {
        const auto expected = 3 * mean_coefficients(parameter, 2);
        checks.expect(at::allclose(parameter.grad(), expected, 1e-12), "not the mean of the sums");
      }
      empty(parameters);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A parameter unused here gets the others' gradient, one unused everywhere none",
          "[reducer]") {
  const Watchdog watchdog("unused parameters");
  Checks checks;
  run_ranks({3}, [&](int rank, const Group& group) {
    Tensors parameters;
    for (int i = 0; i < 4; ++i) {
      parameters.push_back(leaf(at::zeros({3}, at::kDouble)));
    }
    const auto reducer = Reducer::create(parameters, {}, group, capped(24));
    for (int step = 0; step < 3; ++step) {
      const int user = step;  // of parameter 1; no rank uses parameter 2
      Tensors used{parameters[0], parameters[3]};
      if (rank == user) {
        used.push_back(parameters[1]);
      }
      linear_loss(used, rank).backward();
      checks.expect(at::allclose(parameters[0].grad(), mean_coefficients(parameters[0], 3), 1e-12),
                    "used by all");
      checks.expect(
          parameters[1].grad().defined() &&
              at::allclose(parameters[1].grad(), coefficients(parameters[1], user) / 3, 1e-12),
          "used by one");
      checks.expect(!parameters[2].grad().defined(), "used by nobody");
      empty(parameters);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Parameters and buffers begin as rank 0's, and buffers agree after every step",
          "[reducer]") {
  const auto dtype =
      GENERATE(at::kFloat, at::kDouble, at::kBFloat16);  // of the bucket that carries the buffers
  const Watchdog watchdog("buffers agree");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const Tensors parameters{leaf(at::full({3}, rank + 1, dtype))};
    const Tensors buffers{at::full({2}, 0.3 + rank, at::kFloat), at::full({}, 7 + rank, at::kLong),
                          at::full({3}, 1e-300 * (rank + 1), at::kDouble),
                          at::full({2}, rank == 0, at::kBool),
                          at::full({1}, 0.1 + rank, at::kHalf)};
    const auto reducer = Reducer::create(parameters, buffers, group, capped(1 << 20));
    checks.expect(at::equal(parameters[0], at::full({3}, 1, dtype)), "parameters of rank 0");
    checks.expect(at::equal(buffers[1], at::full({}, 7, at::kLong)), "buffers of rank 0");
    for (int step = 0; step < 2; ++step) {
      const at::Tensor counted = at::full({}, (int64_t{1} << 40) + step, at::kLong);
      const Tensors own{at::full({2}, 0.7 + step, at::kFloat), counted,
                        at::full({3}, 1e-200 + step, at::kDouble),
                        at::full({2}, step == 1, at::kBool), at::full({1}, 0.2 + step, at::kHalf)};
      for (size_t i = 0; i < buffers.size(); ++i) {
        if (rank == 0) {
          buffers[i].copy_(own[i]);
        } else {
          buffers[i].zero_();
        }
      }
      linear_loss(parameters, rank).backward();
      for (size_t i = 0; i < buffers.size(); ++i) {
        checks.expect(at::equal(buffers[i], own[i]), "buffer " + std::to_string(i));
      }
      empty(parameters);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A sparse gradient is reduced, and empty where it was not used", "[reducer]") {
  const Watchdog watchdog("sparse gradients");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const auto table = leaf(at::zeros({5, 2}, at::kDouble));
    const auto dense = leaf(at::ones({2}, at::kDouble));
    auto options = capped(1 << 20);
    options.sparse = {true, false};
    const auto reducer = Reducer::create({table, dense}, {}, group, options);
    for (const bool both : {true, false}) {
      auto loss = dense.sum();
      if (both || rank == 1) {
        const auto rows = at::arange(rank, rank + 2, at::kLong);
        loss = loss + at::embedding(table, rows, -1, false, true).sum();
      }
      loss.backward();
      const auto expected = both ? at::tensor({0.5, 1.0, 0.5, 0.0, 0.0}, at::kDouble)
                                 : at::tensor({0.0, 0.5, 0.5, 0.0, 0.0}, at::kDouble);
      checks.expect(table.grad().defined() && table.grad().is_sparse(), "not sparse");
      checks.expect(at::equal(table.grad().to_dense(), expected.unsqueeze(1).expand({5, 2})),
                    "values");
      checks.expect(at::equal(dense.grad(), at::ones({2}, at::kDouble)), "the dense parameter");
      empty({table, dense});
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Sparse gradients of every dtype and shape are summed in the same order on all ranks",
          "[reducer]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16, at::kHalf, at::kComplexDouble);
  const std::vector<int64_t> row =
      GENERATE(std::vector<int64_t>{}, std::vector<int64_t>{3}, std::vector<int64_t>{2, 3});
  const Watchdog watchdog("dtypes of sparse gradients");
  constexpr int kRanks = 3;
  constexpr int64_t kWords = 7;
  std::vector<int64_t> shape{kWords};
  shape.insert(shape.end(), row.begin(), row.end());
  const auto values_of = [&](int rank) {
    return (at::arange(rank * kWords * c10::multiply_integers(row),
                       (rank + 1) * kWords * c10::multiply_integers(row), at::kDouble) /
            8)
        .to(dtype)
        .view(shape);
  };
  std::vector<at::Tensor> results(kRanks);
  Checks checks;
  run_ranks({kRanks}, [&](int rank, const Group& group) {
    const auto table = leaf(at::zeros(shape, dtype));
    auto options = capped(1 << 20);
    options.sparse = {true};
    const auto reducer = Reducer::create({table}, {}, group, options);
    const auto own = values_of(rank).narrow(0, 0, 2 * rank + 1).clone();  // another number each
    const auto words = at::arange(2 * rank + 1).unsqueeze(0);
    auto whole =
        at::_sparse_coo_tensor_unsafe(words, own, shape, own.options().layout(at::kSparse));
    table.backward(whole);
    checks.expect(table.grad().is_sparse() && table.grad().is_coalesced(), "not sparse");
    results[rank] = table.grad().to_dense();
  });
  REQUIRE(checks.failures() == std::vector<std::string>{});
  auto sum = at::zeros(shape, dtype);
  for (int rank = 0; rank < kRanks; ++rank) {
    sum.narrow(0, 0, 2 * rank + 1).add_(values_of(rank).narrow(0, 0, 2 * rank + 1).div(kRanks));
  }
  CHECK(at::allclose(results[0], sum, 1e-2, 1e-2));
  for (int rank = 1; rank < kRanks; ++rank) {
    CHECK(at::equal(results[0], results[rank]));
  }
}

TEST_CASE("Ranks whose models differ learn which parameter, on every rank",
          "[reducer][bad input]") {
  struct Difference {
    Tensors mine;
    Tensors theirs;
    const char* text;
  };
  const auto zeros = [](at::IntArrayRef sizes, c10::ScalarType dtype = at::kFloat) {
    return at::zeros(sizes, dtype);
  };
  const Difference differences[] = {
      {{zeros({2}), zeros({3})}, {zeros({2})}, "parameter 1 'b' is [3] Float"},
      {{zeros({2}), zeros({3})},
       {zeros({2}), zeros({4})},
       "on rank 0 parameter 1 'b' is [3] Float, on rank 1 parameter 1 'b' is [4] Float"},
      {{zeros({2}), zeros({3})},
       {zeros({2}, at::kHalf), zeros({3})},
       "on rank 1 parameter 0 'a' is [2] Half"},
      {{zeros({2, 3})},
       {zeros({3, 2})},
       "on rank 0 parameter 0 'a' is [2, 3] Float, on rank 1 parameter 0 'a' is [3, 2] Float"},
  };
  const int odd = GENERATE(1, 2);
  const Watchdog watchdog("models differ");
  Checks checks;
  for (const auto& difference : differences) {
    run_ranks({odd + 1}, [&](int rank, const Group& group) {
      Tensors parameters;
      for (const auto& tensor : rank == odd ? difference.theirs : difference.mine) {
        parameters.push_back(leaf(tensor.clone()));
      }
      ReducerOptions options;
      options.names = {"a", "b"};
      options.names.resize(parameters.size());
      auto text = std::string(difference.text);
      const auto at = text.find("rank 1");
      if (at != std::string::npos) {
        text.replace(at, 6, "rank " + std::to_string(odd));
      }
      try {
        Reducer::create(parameters, {}, group, options);
        checks.expect(false, text + ": nothing was raised");
      } catch (const PlanMismatch& e) {
        checks.expect(std::string(e.what()).find(text) != std::string::npos,
                      text + ": " + e.what_without_backtrace());
      }
      const auto after = catching([&] { Reducer::create({leaf(zeros({1}))}, {}, group, {}); });
      checks.expect(after.type == Type::nothing, "the group is spoilt: " + after.text);
    });
  }
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A reducer needs a group, and parameters that need a gradient", "[reducer][bad input]") {
  CHECK_THROWS_AS(Reducer::create({leaf(at::zeros({1}))}, {}, {}, {}), c10::ValueError);
  CHECK_THROWS_WITH(Reducer::create({leaf(at::zeros({1}))}, {}, {}, {}),
                    Catch::Contains("no process group (group: null)"));
  run_ranks({1}, [](int, const Group& group) {
    CHECK_THROWS_WITH(Reducer::create({}, {}, group, {}),
                      Catch::Contains("no parameter needs a gradient (parameters: 0)"));
    CHECK_THROWS_WITH(Reducer::create({at::zeros({1})}, {}, group, {}),
                      Catch::Contains("require a gradient"));
    CHECK_THROWS_WITH(Reducer::create({leaf(at::zeros({1}))}, {}, group, capped(0)),
                      Catch::Contains("caps must be positive"));
  });
}

TEST_CASE("A reduction dtype is a real floating one of 16 bits or more", "[reducer][bad input]") {
  using enum c10::ScalarType;
  run_ranks({1}, [](int, const Group& group) {
    for (int8_t i = 0; i < static_cast<int8_t>(NumOptions); ++i) {
      ReducerOptions options;
      options.wire_dtype = static_cast<c10::ScalarType>(i);
      const auto caught =
          catching([&] { Reducer::create({leaf(at::zeros({1}))}, {}, group, options); });
      const auto& dtype = *options.wire_dtype;
      const bool reduced = dtype == Double || dtype == Float || dtype == Half || dtype == BFloat16;
      INFO(c10::toString(dtype) << ": " << caught.text);
      CHECK(caught.type == (reduced ? Caught::Type::nothing : Caught::Type::value_error));
      CHECK((reduced || caught.text.find(std::string("(wire_dtype: ") + c10::toString(dtype) +
                                         "); choose ") != std::string::npos));
    }
  });
}

TEST_CASE("autograd.grad and a reducer that is gone leave the other ranks alone", "[reducer]") {
  const Watchdog watchdog("backwards that are no step");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Tensors parameters{leaf(at::zeros({3}, at::kDouble)), leaf(at::zeros({2}, at::kDouble))};
    auto reducer = Reducer::create(parameters, {}, group, capped(1));
    if (rank == 0) {
      linear_loss(parameters, 0).backward({}, false, false, at::TensorList(parameters).slice(0, 1));
      checks.expect(reducer->counters().launches == 0, "backward(inputs) was reduced");
      empty(parameters);
    }
    linear_loss(parameters, rank).backward();
    checks.expect(at::allclose(parameters[1].grad(), mean_coefficients(parameters[1], 2), 1e-12),
                  "the mean");
    empty(parameters);
    linear_loss(parameters, rank).backward({}, false, false, parameters);
    checks.expect(at::allclose(parameters[1].grad(), mean_coefficients(parameters[1], 2), 1e-12),
                  "all parameters as inputs");
    reducer.reset();
    empty(parameters);
    linear_loss(parameters, rank).backward();
    checks.expect(at::equal(parameters[1].grad(), coefficients(parameters[1], rank)),
                  "reduced by nobody");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A backward that did not pass the wrapper stays this rank's own", "[reducer]") {
  const Watchdog watchdog("a local backward");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const auto loss_of = [](auto&& output, const Batch& batch) {
      return at::mse_loss(output, batch.target);
    };
    Tensors mean;
    for (int other = 0; other < 2; ++other) {
      Net net(false, at::kDouble);
      const auto batch = batch_of(other, 0, 5, at::kDouble);
      loss_of(net.forward(batch.data), batch).div(2).backward();
      const auto gradients = net.gradients();
      for (size_t i = 0; i < gradients.size(); ++i) {
        mean.push_back(other == 0 ? gradients[i] : gradients[i] + mean[i]);
      }
      mean.erase(mean.begin(), mean.begin() + (other == 0 ? 0 : gradients.size()));
    }
    DistributedDataParallel<Net> model(std::make_shared<Net>(false, at::kDouble), group,
                                       capped(24));
    const auto batch = batch_of(rank, 0, 5, at::kDouble);
    for (int step = 0; step < 3; ++step) {
      if (rank == 1) {
        loss_of(model->forward(batch.data), batch).mul(500).backward();
        empty(model->parameters());
      }
      loss_of(model(batch.data), batch).backward();
      for (size_t i = 0; i < mean.size(); ++i) {
        checks.expect(at::allclose(model->gradients()[i], mean[i], 1e-12, 1e-15),
                      "step " + std::to_string(step) + ", parameter " + std::to_string(i));
      }
      empty(model->parameters());
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A later reducer takes over, and the earlier one says so", "[reducer]") {
  const Watchdog watchdog("two reducers of a parameter");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const auto net = std::make_shared<Net>(false, at::kDouble);
    const auto batch = batch_of(rank, 0, 5, at::kDouble);
    DistributedDataParallel<Net> first(net, group, capped(24));
    const auto early = at::mse_loss(first(batch.data), batch.target);
    net->fault->armed = rank == 1;  // rank 1 owes a step when it wraps again
    net->fault->at = Fault::At::forward;
    const auto failed = catching([&] { at::mse_loss(first(batch.data), batch.target).backward(); });
    checks.expect(failed.type == (rank == 1 ? Type::runtime_error : Type::rank_failed),
                  "rank 1 failed: " + failed.text);
    DistributedDataParallel<Net> second(net, group, capped(24));
    for (int step = 0; step < 2; ++step) {
      at::mse_loss(second(batch.data), batch.target).backward();
      Tensors all;
      for (const auto& gradient : net->gradients()) {
        all.push_back(gradient.reshape({-1}));
      }
      auto sum = at::cat(all);
      std::vector<at::Tensor> summed{sum.clone()};
      group->allreduce(summed)->wait();
      checks.expect(at::allclose(sum * 2, summed[0], 1e-12), "ranks have the same");
      empty(net->parameters());
    }
    for (const auto& use :
         std::vector<std::function<void()>>{[&] { first(batch.data); }, [&] { early.backward(); },
                                            [&] { first.reducer()->attempt().begin(0); },
                                            [&] { first.reducer()->loop().join_step(); }}) {
      const auto caught = catching(use);
      checks.expect(caught.type == Type::other &&
                        caught.text.find("(parameter: first.weight)") != std::string::npos,
                    "ended with '" + caught.text + "'");
    }
    checks.expect(!first.reducer()->loop().owes(), "owes nothing");
    const at::NoGradGuard no_grad;
    checks.expect(first(batch.data).defined(), "evaluates");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_reducer
