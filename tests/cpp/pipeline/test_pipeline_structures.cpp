// What moves between stages, and what a stage may be.
#include <ATen/core/Dict.h>
#include <brimful/pipeline/schedules.h>
#include <brimful/pipeline/skip.h>
#include "support/catch.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <utility>

namespace test_pipeline_structures {

using namespace brimful;
using namespace brimful::test;
using pipeline::make_stage;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Stage;

namespace {

constexpr int64_t kRows = 7;

struct Data {
  at::Tensor x = filled({kRows, 4}, 3, at::kDouble);
  at::Tensor y = filled({kRows, 4}, 4, at::kDouble);
};

PipelineOptions in_three() {
  PipelineOptions options;
  options.microbatches = 3;
  return options;
}

/// The gradients of a step through `stages`, and those of the loss of the whole model.
void require_equal(const Layers& model, const std::vector<Stage>& stages, const at::Tensor& loss,
                   PipelineOptions options = in_three()) {
  loss.backward();
  const auto expected = model.gradients();
  model.zero_grad();
  const Data data;
  Pipeline pipe(stages, std::move(options));
  const auto outcome = pipe.step(data.x, data.y, mse);
  REQUIRE(outcome.loss == Approx(loss.item<double>()).epsilon(1e-12));
  REQUIRE(all_close(model.gradients(), expected));
}

PipelineOptions options_of(const std::string& schedule) {
  auto options = in_three();
  options.schedule = schedule;
  return options;
}
}  // namespace

TEST_CASE("Stages pass several tensors, some of them without gradients", "[pipeline]") {
  const Watchdog watchdog("several tensors");
  const auto schedule = GENERATE(values<std::string>({"1f1b", "zb_h1"}));
  const Layers model(2);
  const Data data;
  const auto& first = model.layers[0];
  const auto& second = model.layers[1];
  const auto head = [&](const at::Tensor& x) {
    const auto h = first(x);
    return std::make_tuple(h, h * 2, h.detach() > 0, at::arange(x.size(0)));
  };
  const auto tail = [&](const std::vector<at::Tensor>& parts) {
    return second(parts[0] + parts[1] * parts[2]) + parts[3].unsqueeze(1);
  };
  const auto h = first(data.x);
  std::vector<at::Tensor> rows;
  for (const auto count : {3, 2, 2}) {
    rows.push_back(at::arange(count));
  }
  const auto whole = second(h + h * 2 * (h > 0)) + at::cat(rows).unsqueeze(1);
  require_equal(model,
                {make_stage(head, first.parameters()), make_stage(tail, second.parameters())},
                mse(whole, data.y), options_of(schedule));
}

TEST_CASE("Stages pass dicts and numbers as IValues", "[pipeline]") {
  const Watchdog watchdog("dicts");
  const Layers model(2);
  const Data data;
  const auto head = [&](const at::Tensor& x) {
    c10::Dict<std::string, at::Tensor> parts;
    parts.insert("h", model.layers[0](x));
    parts.insert("mask", x > 0);
    return c10::IValue(c10::ivalue::Tuple::create({c10::IValue(parts), c10::IValue(3.0)}));
  };
  const auto tail = [&](const c10::IValue& input) {
    const auto& elements = input.toTupleRef().elements();
    const auto parts = elements[0].toGenericDict();
    const auto h = parts.at("h").toTensor() * parts.at("mask").toTensor();
    return model.layers[1](h * elements[1].toDouble());
  };
  const auto whole = model.layers[1](model.layers[0](data.x) * (data.x > 0) * 3.0);
  require_equal(model,
                {make_stage(head, model.layers[0].parameters()),
                 make_stage(tail, model.layers[1].parameters())},
                mse(whole, data.y));
}

TEST_CASE("A skip connection goes past the stages in between, and its gradient comes back",
          "[pipeline]") {
  const Watchdog watchdog("a skip connection");
  const auto schedule = GENERATE(values<std::string>({"gpipe", "1f1b", "zb_h1"}));
  const Layers model(3);
  const Data data;
  const auto head = [&](const at::Tensor& x) {
    const auto h = model.layers[0](x);
    pipeline::stash("h", h);
    pipeline::stash("unused", h * 2);
    pipeline::stash("nothing", at::Tensor());
    return at::Tensor(h * 0.5);
  };
  const auto tail = [&](const at::Tensor& x) {
    pipeline::pop("unused");
    TORCH_CHECK(!pipeline::pop("nothing").defined(), "nothing was stashed");
    return model.layers[2](x + pipeline::pop("h"));
  };
  const auto h = model.layers[0](data.x);
  const auto whole = model.layers[2](model.layers[1](h * 0.5) + h);
  require_equal(model,
                {make_stage(head, model.layers[0].parameters()),
                 make_stage(model.layers[1], model.layers[1].parameters()),
                 make_stage(tail, model.layers[2].parameters())},
                mse(whole, data.y), options_of(schedule));
}

TEST_CASE("Outside a pipeline a skip keeps its graph, and the later stash counts", "[pipeline]") {
  CHECK_THROWS_WITH(pipeline::pop("h"),
                    Catch::Contains("no earlier layer") && Catch::Contains("(name: h)"));
  const auto h = at::ones({2}).requires_grad_() * 2;
  pipeline::stash("h", at::zeros({3}));  // by a forward that failed
  pipeline::stash("h", h);
  CHECK(pipeline::pop("h").is_same(h));
  CHECK_THROWS_AS(pipeline::pop("h"), c10::ValueError);
}

TEST_CASE("What a stage changes in place may be what the one before gives", "[pipeline]") {
  const Watchdog watchdog("in place");
  const Layers model(2);
  const Data data;
  const auto head = [&](const at::Tensor& x) { return at::Tensor(model.layers[0](x) * 1.5); };
  const auto tail = [&](at::Tensor x) { return model.layers[1](x.relu_()); };
  require_equal(model,
                {make_stage(head, model.layers[0].parameters()),
                 make_stage(tail, model.layers[1].parameters())},
                mse(model.layers[1]((model.layers[0](data.x) * 1.5).relu()), data.y));
}

TEST_CASE("Skips twice, of unknown names and that no stage pops are refused", "[pipeline]") {
  const Data data;
  const Layers model(2);
  const auto twice = [&](const at::Tensor& x) {
    pipeline::stash("h", x);
    pipeline::stash("h", x);
    return x;
  };
  const auto unknown = [&](const at::Tensor& x) { return at::Tensor(x + pipeline::pop("g")); };
  const auto stash = [&](const at::Tensor& x) {
    pipeline::stash("h", x);
    return model.layers[0](x);
  };
  Pipeline first({make_stage(twice), make_stage(model.layers[1])}, in_three());
  CHECK_THROWS_WITH(first.step(data.x, data.y, mse), Catch::Contains("already (name: h)"));
  Pipeline second({make_stage(stash, model.layers[0].parameters()), make_stage(unknown)},
                  in_three());
  CHECK_THROWS_WITH(second.step(data.x, data.y, mse),
                    Catch::Contains("name: g, there are: h") && Catch::Contains("in stage 1"));
  Pipeline third({make_stage(stash, model.layers[0].parameters()), make_stage(model.layers[1])},
                 in_three());
  CHECK_THROWS_WITH(third.step(data.x, data.y, mse),
                    Catch::Contains("no stage has popped (name: h)") &&
                        Catch::Contains("microbatch 0 in stage 1"));
}

TEST_CASE("What a step that failed has stashed does not disturb the next one", "[pipeline]") {
  const Watchdog watchdog("stashed by a step that failed");
  const Data data;
  const Layers model(2);
  bool fails = true;
  const auto head = [&](const at::Tensor& x) {
    const auto h = model.layers[0](x);
    pipeline::stash("h", h);
    return h;
  };
  const auto tail = [&](const at::Tensor& x) {
    TORCH_CHECK(!std::exchange(fails, false), "planted");
    return model.layers[1](x + pipeline::pop("h"));
  };
  Pipeline pipe({make_stage(head, model.layers[0].parameters()),
                 make_stage(tail, model.layers[1].parameters())},
                in_three());
  CHECK_THROWS_WITH(pipe.step(data.x, data.y, mse), Catch::Contains("planted"));
  CHECK_NOTHROW(pipe.step(data.x, data.y, mse));
}

TEST_CASE("A stage that uses parameters which it does not name is refused", "[pipeline]") {
  const Data data;
  const Layers model(2);
  const int which = GENERATE(0, 1);
  auto stages = model.stages();
  stages[which].parameters = {model.layers[which].weight};
  Pipeline pipe(stages, in_three());
  CHECK_THROWS_WITH(pipe.step(data.x, data.y, mse),
                    Catch::Contains("does not know of (stage: " + std::to_string(which)) &&
                        Catch::Contains("parameters: 1, shape of one: [4]"));
  CHECK_FALSE(model.layers[0].weight.grad().defined());
  CHECK_FALSE(model.layers[1].weight.grad().defined());
}

TEST_CASE("A stage may make leaves of its own", "[pipeline]") {
  const Data data;
  const Layers model(2);
  const auto head = [&](const at::Tensor& x) {
    return model.layers[0](x.detach().set_requires_grad(true));
  };
  require_equal(model,
                {make_stage(head, model.layers[0].parameters()),
                 make_stage(model.layers[1], model.layers[1].parameters())},
                mse(model(data.x), data.y));
}

TEST_CASE("Weights that stages share get the gradients of both", "[pipeline]") {
  const Watchdog watchdog("tied weights");
  const auto schedule = GENERATE(values<std::string>({"gpipe", "1f1b", "zb_h1"}));
  const Layers model(2);
  const auto& tied = model.layers[0];
  const auto& middle = model.layers[1];
  const Data data;
  require_equal(model,
                {make_stage(tied, tied.parameters()), make_stage(middle, middle.parameters()),
                 make_stage(tied, tied.parameters())},
                mse(tied(middle(tied(data.x))), data.y), options_of(schedule));
}

TEST_CASE("Frozen stages take no gradient, and pass on what they get", "[pipeline]") {
  const Watchdog watchdog("frozen stages");
  const auto schedule = GENERATE(values<std::string>({"1f1b", "zb_h1"}));
  const int frozen = GENERATE(0, 1, 2);
  CAPTURE(schedule, frozen);
  const Layers model(3);
  for (const auto& parameter : model.layers[frozen].parameters()) {
    parameter.set_requires_grad(false);
  }
  const Data data;
  require_equal(model, model.stages(), mse(model(data.x), data.y), options_of(schedule));
}

TEST_CASE("A weight of the loss's own counts, and microbatches of weight 0 do not", "[pipeline]") {
  const Watchdog watchdog("weights");
  const auto schedule = GENERATE(values<std::string>({"1f1b", "zb_h1"}));
  const Layers model(2);
  const Data data;
  const auto mask = at::tensor({1, 0, 1, 0, 0, 1, 1}, at::kDouble);  // none in the second of three
  const auto masked = [](const at::Tensor& output,
                         const std::pair<at::Tensor, at::Tensor>& target) {
    const auto& [y, counts] = target;
    const auto weight = counts.sum().item<double>();
    const auto error = (output - y).pow(2).mean(1);
    return PieceLoss{(error * counts).sum() / weight, weight};
  };
  const auto whole = masked(model(data.x), {data.y, mask}).loss;
  whole.backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();
  Pipeline pipe(model.stages(), options_of(schedule));
  const auto outcome = pipe.step(data.x, std::make_pair(data.y, mask), masked);
  CHECK(outcome.weight == 4);
  CHECK(outcome.loss == Approx(whole.item<double>()).epsilon(1e-12));
  CHECK(all_close(model.gradients(), expected));
}

TEST_CASE("Shapes may change from microbatch to microbatch", "[pipeline]") {
  const Watchdog watchdog("shapes");
  const Layers model(2);
  const Data data;
  const auto head = [&](const at::Tensor& x) {
    const auto longest = 1 + static_cast<int64_t>(x.abs().max().item<double>() * 1e6) % 3;
    return at::Tensor(model.layers[0](x).unsqueeze(1).repeat({1, longest, 1}));
  };
  const auto tail = [&](const at::Tensor& x) { return at::Tensor(model.layers[1](x).mean(1)); };
  require_equal(model,
                {make_stage(head, model.layers[0].parameters()),
                 make_stage(tail, model.layers[1].parameters())},
                mse(model(data.x), data.y));
}

TEST_CASE("The caller's grad mode and other state hold in the stages", "[pipeline]") {
  const Watchdog watchdog("the caller's state");
  const Data data;
  const Layers model(2);
  std::atomic<int> with_gradients{0};
  auto stages = model.stages();
  for (auto& stage : stages) {
    stage.forward = [&, inner = stage.forward](const pipeline::Value& input) {
      with_gradients += at::GradMode::is_enabled() ? 1 : 0;
      return inner(input);
    };
  }
  Pipeline pipe(stages, in_three());
  const auto output = pipe.forward(data.x);
  CHECK(with_gradients == 0);
  CHECK_FALSE(output.tensors[0].requires_grad());
  CHECK(at::allclose(output.tensors[0], model(data.x), 1e-12, 1e-14));
  pipe.step(data.x, data.y, mse);
  CHECK(with_gradients == 6);
}

TEST_CASE("Bad input is refused with a message that says what to do", "[pipeline]") {
  const Watchdog watchdog("bad input");
  const Data data;
  const Layers model(2);
  auto options = in_three();
  SECTION("no stages") {
    CHECK_THROWS_AS(Pipeline({}, options), c10::ValueError);
  }
  SECTION("more devices than stages, or no divisor") {
    options.devices.assign(3, c10::Device(c10::DeviceType::CPU));
    CHECK_THROWS_AS(Pipeline(model.stages(), options), c10::ValueError);
    const Layers three(3);
    options.devices.assign(2, c10::Device(c10::DeviceType::CPU));
    CHECK_THROWS_WITH(Pipeline(three.stages(), options), Catch::Contains("stages: 3, devices: 2"));
  }
  SECTION("a schedule that is not defined for the stages, or has no such name") {
    options.devices.assign(1, c10::Device(c10::DeviceType::CPU));
    CHECK_THROWS_AS(Pipeline(model.stages(), options), c10::ValueError);
    options.schedule = "fastest";
    CHECK_THROWS_WITH(Pipeline(model.stages(), options), Catch::Contains("fastest"));
  }
  SECTION("a schedule for other numbers") {
    options.schedule_for = [](int) { return pipeline::gpipe(2, 4); };
    CHECK_THROWS_WITH(Pipeline(model.stages(), options), Catch::Contains("microbatches: 4"));
  }
  SECTION("an empty batch") {
    Pipeline pipe(model.stages(), options);
    CHECK_THROWS_WITH(pipe.step(data.x.narrow(0, 0, 0), data.y.narrow(0, 0, 0), mse),
                      Catch::Contains("the batch is empty"));
  }
  SECTION("a target of another size") {
    Pipeline pipe(model.stages(), options);
    CHECK_THROWS_WITH(pipe.step(data.x, data.y.narrow(0, 0, 5), mse),
                      Catch::Contains("rows: 7 and 5"));
  }
  SECTION("a loss that is no scalar") {
    Pipeline pipe(model.stages(), options);
    const auto per_row = [](const at::Tensor& output, const at::Tensor& target) {
      return at::Tensor((output - target).pow(2).mean(1));
    };
    CHECK_THROWS_WITH(pipe.step(data.x, data.y, per_row),
                      Catch::Contains("not a scalar") && Catch::Contains("in stage 1"));
  }
  SECTION("an output that the next stage cannot take") {
    const Layer wide(5, 4, 6);
    Pipeline pipe({make_stage(wide, wide.parameters()),
                   make_stage(model.layers[1], model.layers[1].parameters())},
                  options);
    CHECK_THROWS_WITH(pipe.step(data.x, data.y, mse),
                      Catch::Contains("[3, 6] Double") && Catch::Contains("4x4"));
  }
  SECTION("a step within a step") {
    Pipeline* inner = nullptr;
    const auto nested = [&](const at::Tensor& x) {
      inner->step(data.x, data.y, mse);
      return x;
    };
    Pipeline pipe({make_stage(nested), make_stage(model.layers[1])}, options);
    inner = &pipe;
    CHECK_THROWS_WITH(pipe.step(data.x, data.y, mse), Catch::Contains("another thread"));
  }
}

}  // namespace test_pipeline_structures
