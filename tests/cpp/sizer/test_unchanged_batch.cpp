// Loss functions that change their batch in place, and those that run backward themselves.
#include <ATen/ATen.h>
#include "support/catch.h"
#include "support/sizer_test.h"

#include <brimful/memory/fault.h>
#include <brimful/sizer/map_batches.h>
#include <brimful/sizer/verify_split.h>

#include <optional>

namespace test_unchanged_batch {

using namespace brimful;
using namespace brimful::test;

namespace {
constexpr int64_t kRows = 8;

PieceLoss dividing(Net& net, const Batch& piece) {
  const auto out = net.forward(piece.data.div_(4));
  return {at::mse_loss(out, piece.target), static_cast<double>(piece.data.size(0))};
}

/// A type of its own, with functions beside it.
struct Own {
  Batch batch;
};
int64_t rows_of(const Own& own) {
  return own.batch.data.size(0);
}
Own slice_rows(const Own& own, int64_t begin, int64_t end) {
  return {{own.batch.data.slice(0, begin, end), own.batch.target.slice(0, begin, end)}};
}
void for_each_tensor(const Own& own, const std::function<void(const at::Tensor&)>& visit) {
  visit(own.batch.data);
  visit(own.batch.target);
}

Own own_batch() {
  return {batch_of(0, 0, kRows, at::kDouble)};
}

struct Alone {
  Alone() : sizer(StepGroup({}, net->parameters()), Transaction(net->buffers(), {})) {}
  Outcome step(const Own& own) {
    return sizer.step(own, [&](const Own& piece) { return dividing(*net, piece.batch); });
  }
  std::shared_ptr<Net> net = std::make_shared<Net>(false, at::kDouble);
  BatchSizer sizer;
};

bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() && y.defined() && at::allclose(x, y, 1e-10, 1e-12);
  });
}

std::vector<at::Tensor> expected_gradients() {
  Net net(false, at::kDouble);
  dividing(net, own_batch().batch).loss.backward();
  return net.gradients();
}

int64_t used() {
  return memory::stats(c10::Device(c10::DeviceType::CPU)).used_bytes;
}
}  // namespace

TEST_CASE("A step that changes its batch is right wherever it is repeated", "[sizer][faults]") {
  const Quiet quiet;
  const auto expected = expected_gradients();
  int64_t retries = 0;
  bool fired = true;
  for (int64_t index = 0; fired; ++index) {
    REQUIRE(index < 400);
    INFO("place " << index);
    Alone alone;
    alone.step(own_batch());
    alone.net->update(0);
    const auto own = own_batch();
    {
      const memory::FaultAt fault(index);
      retries += alone.step(own).retries;
      fired = fault.fired();
    }
    CHECK(close(alone.net->gradients(), expected));
    CHECK(at::equal(own.batch.data, own_batch().batch.data / 4));
  }
  CHECK(retries > 10);
}

TEST_CASE("A first step that cannot be repeated with its batch says so", "[sizer][faults]") {
  const Quiet quiet;
  Alone alone;
  bool fail = true;
  const auto caught = catching([&] {
    alone.sizer.step(own_batch(), [&](const Own& piece) {
      auto loss = dividing(*alone.net, piece.batch);
      TORCH_CHECK_WITH(OutOfMemoryError, !std::exchange(fail, false), "planted");
      return loss;
    });
  });
  CHECK(caught.type == Type::value_error);
  CHECK_THAT(caught.text, Catch::Contains("(tensor: number 0, shape: [8, 4]); change a copy"));
}

TEST_CASE("The other ranks learn that a step cannot be repeated", "[sizer][faults]") {
  const Quiet quiet;
  const Watchdog watchdog("a batch that was changed");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, std::make_shared<Net>(false, at::kDouble));
    for (const bool fails : {true, false}) {  // the second one knows what changes
      const auto batch = batch_of(rank, 0, kRows, at::kDouble);
      bool out_of_memory = rank == 1;
      auto work = trainer.work(batch);
      work.forward = [&, forward = work.forward](int64_t begin, int64_t end) {
        batch.data.narrow(0, begin, end - begin).div_(4);
        TORCH_CHECK_WITH(OutOfMemoryError, !std::exchange(out_of_memory, false), "planted");
        return forward(begin, end);
      };
      work.tensors = [&](int64_t, int64_t) { return std::vector<NamedTensor>{{"x", batch.data}}; };
      const auto caught = catching([&] { trainer.sizer.step(input_of(kRows), work); });
      const auto expected = !fails      ? Type::nothing
                            : rank == 1 ? Type::value_error
                                        : Type::rank_failed;
      checks.expect(caught.type == expected, caught.text);
      checks.expect(!fails || caught.text.find("(tensor: x, shape: [8, 4])") != std::string::npos,
                    caught.text);
      checks.expect(fails || at::equal(batch.data, batch_of(rank, 0, kRows, at::kDouble).data / 4),
                    "the batch");
      trainer.model->update(0);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A mapping that changes its batch is right, or says that it is not", "[sizer][faults]") {
  const Quiet quiet;
  MapOptions options;
  options.pieces = 4;
  int right = 0;
  int refused = 0;
  bool fired = true;
  for (int64_t index = 0; fired; ++index) {
    const auto x = filled({kRows, 3}, 0);
    at::Tensor found;
    std::optional<memory::FaultAt> fault(index);
    const auto caught = catching([&] {
      found = map_batches([](const at::Tensor& piece) { return piece.div_(4).sin(); }, x, options);
    });
    fired = fault->fired();
    fault.reset();
    if (caught.type == Type::value_error) {
      ++refused;
      CHECK_THAT(caught.text, Catch::Contains("(tensor: number 0, shape: [2, 3])"));
      continue;
    }
    ++right;
    CHECK(at::equal(found, (filled({kRows, 3}, 0) / 4).sin()));
  }
  CHECK(right > 4);
  CHECK(refused > 0);
}

TEST_CASE("verify_split leaves the batch", "[sizer][verify]") {
  Net net(false, at::kDouble);
  const auto own = own_batch();
  const auto check =
      verify_split(net, own, [&](const Own& piece) { return dividing(net, piece.batch); });
  CHECK(check.equal);
  CHECK(same_bits(own.batch.data, own_batch().batch.data));
}

TEST_CASE("A loss function that runs backward itself is refused on all ranks", "[sizer]") {
  const Quiet quiet;
  const Watchdog watchdog("backward in a loss function");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, std::make_shared<Net>(false, at::kDouble));
    const auto batch = batch_of(rank, 0, kRows, at::kDouble);
    auto work = trainer.work(batch);
    if (rank == 1) {
      work.forward = [forward = work.forward](int64_t begin, int64_t end) {
        auto piece = forward(begin, end);
        piece.loss.backward({}, /*retain_graph=*/true);
        return piece;
      };
    }
    const auto caught = catching([&] { trainer.sizer.step(input_of(kRows), work); });
    checks.expect(caught.type == (rank == 1 ? Type::value_error : Type::rank_failed), caught.text);
    checks.expect(caught.text.find("ran backward itself") != std::string::npos, caught.text);
    const auto gradients = trainer.model->gradients();
    checks.expect(
        std::none_of(gradients.begin(), gradients.end(), [](const auto& g) { return g.defined(); }),
        "gradients stay");
    checks.expect(catching([&] { trainer.step(batch); }).type == Type::nothing, "the next step");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Nothing of a step that failed stays in use", "[sizer][faults]") {
  const Quiet quiet;
  const auto left = at::ones({12, 256}).requires_grad_();
  const auto right = at::ones({12, 256}).requires_grad_();
  BatchSizerOptions options;
  options.max_retries = 0;
  BatchSizer sizer(StepGroup({}, {left, right}), Transaction({}, {}), options);
  const auto x = at::ones({kRows, 12});
  const auto step = [&] {
    return catching([&] {
             sizer.step(x, [&](const at::Tensor& piece) {
               return piece.mm(left).tanh().exp().mean() + piece.mm(right).tanh().exp().mean();
             });
           }).type == Type::batch_too_large;
  };
  CHECK_FALSE(step());  // makes what is made once and for all
  int failed = 0;
  bool fired = true;
  for (int64_t index = 0; fired; ++index) {
    REQUIRE(index < 200);
    left.mutable_grad().reset();
    right.mutable_grad().reset();
    const auto before = used();
    {
      const memory::FaultAt fault(index);
      failed += step() ? 1 : 0;
      fired = fault.fired();
    }
    left.mutable_grad().reset();
    right.mutable_grad().reset();
    INFO("place " << index);
    CHECK(used() == before);
  }
  CHECK(failed > 20);
}

}  // namespace test_unchanged_batch
