// What else a step must survive: no data, retries that run out, late gradients, several modules, mixed failures.
#include "support/sizer_test.h"

#include <brimful/memory/fault.h>

namespace test_recovery {

using namespace brimful;
using namespace brimful::test;

namespace {

constexpr int64_t kRows = 8;

std::shared_ptr<Net> exact_net() {
  return std::make_shared<Net>(false, at::kDouble);
}

/// The gradients of the mean loss over all of `batches`, in one process.
std::vector<at::Tensor> reference_gradients(const std::vector<Batch>& batches,
                                            const std::vector<at::Tensor>& parameters = {}) {
  const auto net = exact_net();
  for (size_t i = 0; i < parameters.size(); ++i) {
    net->parameters()[i].set_data(parameters[i].detach());
  }
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> target;
  for (const auto& batch : batches) {
    data.push_back(batch.data);
    target.push_back(batch.target);
  }
  at::mse_loss(net->forward(at::cat(data)), at::cat(target)).backward();
  return net->gradients();
}

bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() && y.defined() && at::allclose(x, y, 1e-12, 1e-14);
  });
}

Fault fault_at(Fault::At at, int piece, int parameter, Fault::Kind kind, const std::string& text) {
  Fault fault;
  fault.at = at;
  fault.piece = piece;
  fault.parameter = parameter;
  fault.kind = kind;
  fault.text = text;
  fault.armed = true;
  return fault;
}

/// A loader as the simplest C++ code would write it.
struct Loader {
  std::vector<Batch> items;
  auto begin() const { return items.begin(); }
  auto end() const { return items.end(); }
};

}  // namespace

TEST_CASE("Ranks without data leave the mean of the others exact", "[sizer][faults]") {
  const Quiet quiet;
  const int world_size = GENERATE(2, 3);
  const Watchdog watchdog("ranks without data");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    for (unsigned without = 1; without < 1U << world_size; ++without) {
      Trainer trainer(group, exact_net());
      std::vector<Batch> others;
      for (int other = 0; other < world_size; ++other) {
        if ((without >> other & 1U) == 0) {
          others.push_back(batch_of(other, 0, 3 + other, at::kDouble));
        }
      }
      const bool has_data = (without >> rank & 1U) == 0;
      const auto name =
          "without data: " + std::to_string(without) + " (bits), rank " + std::to_string(rank);
      for (int repeat = 0; repeat < 2; ++repeat) {  // with an exchange, and without
        const auto outcome = trainer.fill(
            has_data ? std::optional(batch_of(rank, 0, 3 + rank, at::kDouble)) : std::nullopt);
        const auto gradients = trainer.model->gradients();
        if (others.empty()) {
          checks.expect(outcome.weight == 0 && outcome.loss == 0, name + ": weight or loss");
          checks.expect(std::all_of(gradients.begin(), gradients.end(),
                                    [](const auto& g) {
                                      return g.defined() && at::all(g == 0).template item<bool>();
                                    }),
                        name + ": gradients are not zero");
        } else {
          checks.expect(close(gradients, reference_gradients(others)),
                        name + ": not the mean of the others");
        }
        trainer.model->update(0);
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A rank without data follows one that runs out or fails", "[sizer][faults]") {
  const Quiet quiet;
  const int world_size = GENERATE(2, 3);
  const Watchdog watchdog("a rank without data beside one that fails");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    for (const auto kind : {Fault::Kind::out_of_memory, Fault::Kind::error}) {
      for (int parameter = 0; parameter < 6; ++parameter) {
        Trainer trainer(group, exact_net());
        if (rank == 1) {
          *trainer.model->fault = fault_at(Fault::At::gradient, 0, parameter, kind, "planted");
        }
        const auto input =
            rank == 0 ? std::nullopt : std::optional(batch_of(rank, 0, kRows, at::kDouble));
        const auto caught = catching([&] { trainer.fill(input); });
        const auto name =
            "parameter " + std::to_string(parameter) + ", rank " + std::to_string(rank) + ": ";
        if (kind == Fault::Kind::error) {
          checks.expect(caught.type == (rank == 1 ? Type::runtime_error : Type::rank_failed),
                        name + caught.text);
          continue;
        }
        std::vector<Batch> others;
        for (int other = 1; other < world_size; ++other) {
          others.push_back(batch_of(other, 0, kRows, at::kDouble));
        }
        checks.expect(caught.type == Type::nothing, name + caught.text);
        checks.expect(close(trainer.model->gradients(), reference_gradients(others)),
                      name + "not the mean");
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A rank that runs out beside one that fails learns of it", "[sizer][faults]") {
  const Quiet quiet;
  const int world_size = GENERATE(2, 3);
  const Watchdog watchdog("mixed failures");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    for (int parameter = 0; parameter < 6; ++parameter) {
      for (int other = 0; other < 6; ++other) {
        Trainer trainer(group, exact_net());
        const auto before = trainer.state();
        if (rank < 2) {
          const auto kind = rank == 0 ? Fault::Kind::out_of_memory : Fault::Kind::error;
          *trainer.model->fault =
              fault_at(Fault::At::gradient, 0, rank == 0 ? parameter : other, kind, "planted");
        }
        const auto caught = catching([&] { trainer.step(batch_of(rank, 0, kRows, at::kDouble)); });
        const auto name = "parameters " + std::to_string(parameter) + " and " +
                          std::to_string(other) + ", rank " + std::to_string(rank) + ": ";
        checks.expect(caught.type == (rank == 1 ? Type::runtime_error : Type::rank_failed),
                      name + caught.text);
        checks.expect(rank == 1 || caught.rank == 1,
                      name + "names rank " + std::to_string(caught.rank));
        checks.expect(same_bits(before, trainer.state()), name + "left a trace");
        trainer.model->fault->armed = false;
        const auto after = catching([&] { trainer.step(batch_of(rank, 1, kRows, at::kDouble)); });
        checks.expect(after.type == Type::nothing, name + "the next step raised " + after.text);
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("What fails between two attempts is named as such on the other ranks",
          "[sizer][faults]") {
  const Quiet quiet;
  const auto kind = GENERATE(Fault::Kind::out_of_memory, Fault::Kind::error);
  const bool is_shortage = kind == Fault::Kind::out_of_memory;
  const Watchdog watchdog("a failure between two attempts");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    BatchSizerOptions options;
    options.predict = false;  // a prediction is undone too
    Trainer trainer(group, std::make_shared<Net>(), options);
    trainer.step(batch_of(rank, 0, kRows));
    bool fails = rank == 1;
    trainer.sizer.transaction().add({[] {},
                                     [&] {
                                       if (std::exchange(fails, false)) {
                                         TORCH_CHECK_WITH(OutOfMemoryError, !is_shortage,
                                                          "no room for what was captured");
                                         throw std::runtime_error("a keeper failed");
                                       }
                                     }});
    *trainer.model->fault = fault_at(Fault::At::forward, 0, 0, Fault::Kind::out_of_memory, "short");
    trainer.model->fault->armed = rank == 1;
    const auto before = trainer.state();
    const auto caught = catching([&] { trainer.step(batch_of(rank, 1, kRows)); });
    const auto other = is_shortage ? Type::rank_out_of_memory : Type::rank_failed;
    const auto own = is_shortage ? Type::out_of_memory : Type::runtime_error;
    checks.expect(caught.type == (rank == 1 ? own : other),
                  "rank " + std::to_string(rank) + " ended with " + caught.text);
    checks.expect(rank == 1 || caught.rank == 1, "names rank " + std::to_string(caught.rank));
    checks.expect(same_bits(before, trainer.state()), "the failed step left a trace");
    trainer.model->fault->armed = false;
    const auto after = catching([&] { trainer.step(batch_of(rank, 2, kRows)); });
    checks.expect(after.type == Type::nothing, "the next step raised " + after.text);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Buffers come from a rank with data though no rank announced any", "[sizer]") {
  const Quiet quiet;
  const Watchdog watchdog("buffers of ranks without data");
  Checks checks;
  std::vector<std::vector<at::Tensor>> states(2);
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    const auto batches_seen = [&] { return trainer.model->buffers()[2].item<int64_t>(); };
    trainer.step(batch_of(rank, 0, kRows));
    for (int step = 1; step < 5; ++step) {
      trainer.step(rank == 0 ? std::nullopt : std::optional(batch_of(rank, step, kRows)));
      // Only in the first of them no rank knew that rank 0 had none.
      checks.expect(batches_seen() == step, "buffers saw " + std::to_string(batches_seen()) +
                                                " batches in step " + std::to_string(step));
    }
    states[rank] = trainer.state();
  });
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK(same_bits(states[0], states[1]));
}

TEST_CASE("A state that only one rank has loaded is noticed, and does no harm", "[sizer][faults]") {
  const Quiet quiet;
  const Watchdog watchdog("a state on one rank only");
  Checks checks;
  run_ranks({3}, [&](int rank, const Group& group) {
    Trainer trainer(group, exact_net());
    const auto fill = [&](const Batch& batch) {
      auto work = trainer.work(batch);
      work.forward = [forward = work.forward](int64_t begin, int64_t end) {
        auto piece = forward(begin, end);
        piece.weight *= 2;  // not known beforehand
        return piece;
      };
      trainer.sizer.step(input_of(kRows), work);
    };
    fill(batch_of(rank, 0, kRows, at::kDouble));
    trainer.model->update();
    if (rank == 1) {
      auto state = trainer.sizer.state();
      state["last_total"] += 1;
      trainer.sizer.load_state(state);
    }
    const auto before = trainer.state();
    const auto batch = [&](int other) { return batch_of(other, 1, kRows, at::kDouble); };
    const auto caught = catching([&] { fill(batch(rank)); });
    checks.expect(caught.type == Type::value_error, "ended with " + caught.text);
    checks.expect(caught.text.find("(ranks that differ from rank 0: 1); load a state_dict") !=
                      std::string::npos,
                  caught.text);
    checks.expect(same_bits(before, trainer.state()), "the failed step left a trace");
    for (int repeat = 0; repeat < 2; ++repeat) {  // with an exchange, and without
      const auto parameters = trainer.model->parameters();
      std::vector<Batch> batches{batch(0), batch(1), batch(2)};
      const auto after = catching([&] { fill(batch(rank)); });
      checks.expect(after.type == Type::nothing, "the next step raised: " + after.text);
      checks.expect(close(trainer.model->gradients(), reference_gradients(batches, parameters)),
                    "the next step is not the mean");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Every rank learns how long the others worked", "[sizer]") {
  const Quiet quiet;
  const Watchdog watchdog("the time of each rank's work");
  Checks checks;
  std::vector<std::vector<double>> told(2);
  std::vector<double> worked(2);
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    const auto batch = batch_of(rank, 0, kRows);
    auto work = trainer.work(batch);
    work.forward = [&, forward = work.forward](int64_t begin, int64_t end) {
      const auto start = Clock::now();
      const auto elapsed = [&] {
        return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
      };
      auto piece = forward(begin, end);
      while (elapsed() < 5 + 20 * rank) {
      }
      worked[rank] += elapsed();
      return piece;
    };
    const auto input = input_of(kRows, Split{4, 4});
    told[rank] = trainer.sizer.step(input, work).work_ms;
  });
  CHECK(told[0] == told[1]);
  REQUIRE(told[0].size() == 2);
  for (const int rank : {0, 1}) {
    CHECK(told[0][rank] >= worked[rank] * 0.999);  // it travels as a float
  }
}

TEST_CASE("A loop over uneven data ends on all ranks after the same step", "[sizer]") {
  const Quiet quiet;
  const auto counts =
      GENERATE(std::vector<int>{3, 1}, std::vector<int>{0, 2}, std::vector<int>{2, 2},
               std::vector<int>{0, 0}, std::vector<int>{1, 0, 4}, std::vector<int>{0, 0, 1},
               std::vector<int>{0, 0, 0});
  const auto world_size = static_cast<int>(counts.size());
  const Watchdog watchdog("a loop over uneven data");
  const int longest = *std::max_element(counts.begin(), counts.end());
  Checks checks;
  std::vector<std::vector<at::Tensor>> states(world_size);
  run_ranks({world_size}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    for (int epoch = 0; epoch < 2; ++epoch) {
      Loader loader;
      for (int i = 0; i < counts[rank]; ++i) {
        loader.items.push_back(batch_of(rank, i, 4 + i + rank));
      }
      int steps = 0;
      bool last = false;
      for (auto& batch : trainer.sizer.batches(loader)) {
        checks.expect(batch.has_value() == (steps < counts[rank]),
                      "data where there is none, or none where there is");
        checks.expect(!last, "a step after the last one");
        auto outcome = trainer.sizer.step(batch, [&](const Batch& piece) {
          return at::mse_loss(trainer.model(piece.data), piece.target);
        });
        trainer.model->update();
        double weight = 0;
        for (int other = 0; other < world_size; ++other) {
          weight += steps < counts[other] ? 4 + steps + other : 0;
        }
        checks.expect(outcome.weight == weight, "weight " + std::to_string(outcome.weight));
        last = outcome.last;
        ++steps;
      }
      checks.expect(steps == longest,
                    "rank " + std::to_string(rank) + " made " + std::to_string(steps) + " steps");
      checks.expect(last == (longest > 0), "the last step is not announced");
    }
    checks.expect(trainer.model.reducer()->counters().exchanges == 2, "one exchange a loop");
    states[rank] = trainer.state();
  });
  CHECK(checks.failures() == std::vector<std::string>{});
  for (const auto& state : states) {
    CHECK(same_bits(states[0], state));
  }
}

TEST_CASE("A loader that fails raises on every rank", "[sizer][faults]") {
  const Quiet quiet;
  const int at = GENERATE(0, 1, 2);
  struct Failing {
    struct Iterator {
      int i = 0;
      int at = 0;
      Batch operator*() const {
        if (i == at) {
          throw std::runtime_error("the disk is gone");
        }
        return batch_of(0, i, 4);
      }
      Iterator& operator++() {
        ++i;
        return *this;
      }
      bool operator!=(const Iterator& other) const { return i != other.i; }
    };
    int at = 0;
    Iterator begin() const { return {0, at}; }
    Iterator end() const { return {4, at}; }
  };
  const Watchdog watchdog("a loader that fails");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    const auto loss = [&](const Batch& piece) {
      return at::mse_loss(trainer.model(piece.data), piece.target);
    };
    Failing loader{rank == 1 ? at : -1};
    const auto caught = catching([&] {
      for (auto& batch : trainer.sizer.batches(loader)) {
        trainer.sizer.step(batch, loss);
        trainer.model->update();
      }
    });
    checks.expect(caught.type == (rank == 1 ? Type::runtime_error : Type::rank_failed),
                  caught.text);
    checks.expect(caught.text.find("the disk is gone") != std::string::npos, caught.text);
    const auto after = catching([&] { trainer.step(batch_of(rank, 9, 4)); });
    checks.expect(after.type == Type::nothing, "the next step raised: " + after.text);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Retries that run out fail the step on all ranks and the next step works",
          "[sizer][faults]") {
  const Quiet quiet;
  const int world_size = GENERATE(2, 3);
  const auto at = GENERATE(Fault::At::forward, Fault::At::gradient);
  const int64_t max_retries = GENERATE(0, 2, 8);  // 8: one row a piece comes first
  const Watchdog watchdog("retries that run out");
  Checks checks;
  std::vector<std::vector<at::Tensor>> states(world_size);
  run_ranks({world_size}, [&](int rank, const Group& group) {
    BatchSizerOptions options;
    options.max_retries = max_retries;
    Trainer trainer(group, exact_net(), options);
    const auto before = trainer.state();
    if (rank == 1) {
      *trainer.model->fault = fault_at(at, 0, 0, Fault::Kind::out_of_memory, "planted");
      trainer.model->fault->stays = true;
    }
    const auto caught = catching([&] { trainer.step(batch_of(rank, 0, kRows, at::kDouble)); });
    trainer.model->fault->armed = false;
    checks.expect(caught.type == (rank == 1 ? Type::batch_too_large : Type::rank_out_of_memory),
                  caught.text);
    checks.expect(rank == 1 || caught.rank == 1, "wrong rank");
    checks.expect(caught.text.find("planted") != std::string::npos, "no words in: " + caught.text);
    const auto tried = std::min<int64_t>(max_retries, 3);
    checks.expect(
        rank != 1 || caught.text.find(", retries: " + std::to_string(tried)) != std::string::npos,
        caught.text);
    checks.expect(same_bits(before, trainer.state()), "the failed step left a trace");
    const auto after = catching([&] { trainer.step(batch_of(rank, 1, kRows, at::kDouble)); });
    checks.expect(after.type == Type::nothing, "the next step raised: " + after.text);
    states[rank] = trainer.state();
  });
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK(same_bits(states.front(), states.back()));
}

TEST_CASE("A late gradient repeats the step once and the sum is right",
          "[sizer][reducer][faults]") {
  const Quiet quiet;
  const bool everywhere = GENERATE(true, false);
  const Watchdog watchdog("a late gradient");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, exact_net());
    const bool twice = everywhere || rank == 1;
    std::vector<at::Tensor> expected;
    for (const int other : {0, 1}) {
      const auto batch = batch_of(other, 0, kRows, at::kDouble);
      const double factor =
          (everywhere || other == 1) ? 1 : 0.5;  // of a mean over two ranks, twice
      const auto gradients = reference_gradients({batch});
      for (size_t i = 0; i < gradients.size(); ++i) {
        const auto part = gradients[i] * factor;
        if (other == 0) {
          expected.push_back(part);
        } else {
          expected[i] = expected[i] + part;
        }
      }
    }
    for (int step = 0; step < 2; ++step) {
      const auto batch = batch_of(rank, 0, kRows, at::kDouble);
      auto work = trainer.work(batch);
      work.backward = [&](const at::Tensor& loss, const at::Tensor& gradient) {
        loss.backward(gradient, true);
        if (twice) {
          loss.backward(gradient);
        }
      };
      const auto input = input_of(kRows);
      const auto outcome = trainer.sizer.step(input, work);
      checks.expect(outcome.retries == (step == 0 ? 1 : 0),
                    "retries: " + std::to_string(outcome.retries));
      checks.expect(outcome.pieces == 1, "a late gradient split the batch");
      checks.expect(close(trainer.model->gradients(), expected), "the sum is wrong");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("An allocation refused anywhere in a step ends as a retry", "[sizer][faults]") {
  const Quiet quiet;
  const Watchdog watchdog("an allocation refused anywhere");
  Checks checks;
  std::atomic<bool> more = true;
  int64_t index = 0;
  for (; more && index < 400; ++index) {
    std::vector<std::vector<at::Tensor>> states(2);
    run_ranks({2}, [&](int rank, const Group& group) {
      BatchSizerOptions options;
      options.pieces = 2;
      Trainer trainer(group, std::make_shared<Net>(), options);
      trainer.step(batch_of(rank, 0, kRows));
      const auto batch = batch_of(rank, 1, kRows);
      const auto caught = catching([&] {
        if (rank == 1) {
          const memory::FaultAt fault(index);
          trainer.fill(batch);
          more = fault.fired();
        } else {
          trainer.fill(batch);
        }
      });
      checks.expect(caught.type == Type::nothing, "allocation " + std::to_string(index) +
                                                      ", rank " + std::to_string(rank) + ": " +
                                                      caught.text);
      trainer.model->update();
      trainer.step(batch_of(rank, 2, kRows));
      states[rank] = trainer.state();
    });
    checks.expect(same_bits(states[0], states[1]),
                  "allocation " + std::to_string(index) + ": replicas differ");
  }
  CHECK(checks.failures() == std::vector<std::string>{});
  CHECK(index > 30);
}

TEST_CASE("A batch that is too large has its facts in C++ too", "[sizer][too large]") {
  const Quiet quiet;
  Checks checks;
  run_ranks({1}, [&](int, const Group& group) {
    Trainer trainer(group);
    BatchSizer sizer(trainer.model);
    auto work = trainer.work(batch_of(0, 0, 2));
    work.forward = [](int64_t, int64_t) -> PieceLoss {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "planted");
    };
    int64_t parameters = 0;
    for (const auto& parameter : trainer.model->parameters()) {
      parameters += static_cast<int64_t>(parameter.nbytes());
    }
    try {
      sizer.step(input_of(2), work);
      checks.expect(false, "the step stood");
    } catch (const BatchTooLarge& error) {
      const auto& facts = error.facts();
      const std::map<std::string, int64_t> bytes(facts.bytes.begin(), facts.bytes.end());
      checks.expect(facts.rank == 0 && facts.device == "cpu", "rank or device");
      checks.expect(facts.tried.size() == 2 && facts.tried[1].piece_rows == 1, "splits");
      checks.expect(bytes.at("parameters") == parameters, "parameters");
      checks.expect(bytes.count("optimizer state") == 0, "nobody knows of an optimizer");
      checks.expect(!facts.advice.empty(), "advice");
      checks.expect(to_string(sizer.report()).find("failed: 1, retries: 1") != std::string::npos,
                    "report");
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_recovery
