// Modules of TorchScript, packages, keywords and schedules of one's own as a C++ program gives them.
#include "support/catch.h"

#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/pipeline/package_stage.h>
#include <brimful/pipeline/schedules.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdlib>

#include "support/stages.h"
#include "support/watchdog.h"

namespace test_pipeline_stages {

using namespace brimful;
using namespace brimful::test;
using pipeline::make_stage;
using pipeline::package_stage;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Stage;
using pipeline::stage_of;

namespace {
constexpr int64_t kRows = 7;

struct Data {
  at::Tensor x = filled({kRows, 4}, 3, at::kDouble);
  at::Tensor y = filled({kRows, 4}, 4, at::kDouble);
  at::Tensor mask = filled({kRows, 1}, 5, at::kDouble);
};

PipelineOptions in_three(const std::string& schedule = "1f1b") {
  PipelineOptions options;
  options.microbatches = 3;
  options.schedule = schedule;
  return options;
}

/// The layer as a program of TorchScript.
torch::jit::Module scripted(const Layer& layer, const std::string& forward) {
  torch::jit::Module module("Scripted");
  module.register_parameter("weight", layer.weight, false);
  module.register_parameter("bias", layer.bias, false);
  module.register_buffer("one", at::ones({}, at::kDouble));
  module.define(forward);
  return module;
}
const char* const kForward = R"(
def forward(self, x):
    return torch.tanh(torch.linear(x, self.weight, self.bias)) * self.one
)";
const char* const kMasked = R"(
def forward(self, x, mask, scale: float = 1.0):
    return torch.tanh(torch.linear(x, self.weight, self.bias)) * mask * scale
)";
}  // namespace

TEST_CASE("Modules of TorchScript train as stages", "[pipeline]") {
  const Watchdog watchdog("TorchScript");
  const auto schedule = GENERATE(values<std::string>({"1f1b", "zb_h1"}));
  const Layers model(3);
  const Data data;
  mse(model(data.x), data.y).backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();
  auto stages = model.stages();
  stages[1] = stage_of(scripted(model.layers[1], kForward), "scripted");
  CHECK(stages[1].parameters.size() == 2);
  CHECK(stages[1].buffers.size() == 1);
  Pipeline pipe(stages, in_three(schedule));
  const auto outcome = pipe.step(data.x, data.y, mse);
  CHECK(all_close(model.gradients(), expected));
  CHECK(outcome.stages[1].buffer_bytes == 8);
  CHECK(outcome.stages[1].parameter_bytes == (16 + 4) * 8);
  const at::NoGradGuard no_grad;
  CHECK(at::allclose(pipe.forward(data.x).tensors[0], model(data.x), 1e-12, 1e-14));
}

TEST_CASE("Stages ask for keywords by name, and get their microbatch's rows", "[pipeline]") {
  const Watchdog watchdog("keywords");
  const Layers model(2);
  const Data data;
  const auto whole = model.layers[1](model.layers[0](data.x) * data.mask * 2) * data.mask;
  mse(whole, data.y).backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();
  const auto last = [&](const at::Tensor& x) {
    CHECK_FALSE(pipeline::has_keyword("other"));
    return at::Tensor(model.layers[1](x) * pipeline::keyword("mask"));
  };
  Pipeline pipe({stage_of(scripted(model.layers[0], kMasked)),
                 make_stage(last, model.layers[1].parameters())},
                in_three());
  const std::map<std::string, c10::IValue> keywords{{"mask", data.mask}, {"scale", 2.0}};
  pipe.step(data.x, data.y, mse, keywords);
  CHECK(all_close(model.gradients(), expected));
  CHECK(at::allclose(pipe.forward(data.x, keywords).tensors[0], whole, 1e-12, 1e-14));
}

TEST_CASE("Rows lie where Along says, and what is Shared goes to all microbatches", "[pipeline]") {
  const Watchdog watchdog("rows along another dimension");
  const Layers model(2);
  const Data data;
  const auto offset = filled({1, 4}, 5, at::kDouble);
  const auto expected_output = model.layers[1](model.layers[0](data.x) * data.mask + offset);
  mse(expected_output, data.y).backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();
  const auto rows_first = [&](const at::Tensor& turned, const at::Tensor& shared) {
    CHECK(at::equal(shared, offset));
    return at::Tensor(model.layers[0](turned.t()) * pipeline::keyword("mask").t() +
                      pipeline::keyword("offset"));
  };
  Pipeline pipe({make_stage(rows_first, model.layers[0].parameters()),
                 make_stage(model.layers[1], model.layers[1].parameters())},
                in_three());
  const std::tuple batch{Along{data.x.t(), 1}, Shared{offset}};
  using Named = std::variant<at::Tensor, Along, Shared<at::Tensor>>;
  const std::map<std::string, Named> keywords{{"mask", Along{data.mask.t(), -1}},
                                              {"offset", Shared{offset}}};
  const auto turned_mse = [](const at::Tensor& output, const at::Tensor& target) {
    return at::Tensor(mse(output, target.t()));
  };
  pipe.step(batch, Along{data.y.t(), 1}, turned_mse, keywords);
  CHECK(all_close(model.gradients(), expected));
  CHECK(at::allclose(pipe.forward(batch, keywords).tensors[0], expected_output, 1e-12, 1e-14));
  const Along wrong{data.y, 1};
  CHECK_THROWS_WITH(pipe.step(batch, wrong, turned_mse, keywords),
                    Catch::Contains("(rows: 7 and 4)"));
  const std::vector<Along> twice{{data.x.t(), 1}, {data.mask.t(), 1}};
  Pipeline vectors({make_stage([](const at::Tensor& x, const at::Tensor& mask) {
                     return at::Tensor((x * mask).t());
                   })},
                   in_three());
  CHECK(at::equal(vectors.forward(twice).tensors[0], data.x * data.mask));
  CHECK(at::equal(
      vectors.forward(std::pair(Along{data.x.t(), 1}, Along{data.mask.t(), 1})).tensors[0],
      data.x * data.mask));
}

TEST_CASE("Keywords that are not there, or of another size, are refused", "[pipeline]") {
  const Watchdog watchdog("wrong keywords");
  CHECK_THROWS_WITH(pipeline::keyword("mask"), Catch::Contains("stage: none"));
  CHECK_FALSE(pipeline::has_keyword("mask"));
  CHECK(pipeline::keyword_names().empty());
  const Layers model(2);
  const Data data;
  const auto ask = [&](const at::Tensor& x) { return at::Tensor(x * pipeline::keyword("mask")); };
  Pipeline pipe({make_stage(model.layers[0], model.layers[0].parameters()), make_stage(ask)},
                in_three());
  CHECK_THROWS_WITH(
      pipe.step(data.x, data.y, mse, std::map<std::string, at::Tensor>{{"msk", data.mask}}),
      Catch::Contains("name: mask, there are: msk"));
  CHECK_THROWS_WITH(pipe.step(data.x, data.y, mse), Catch::Contains("there are: none"));
  const auto few = data.mask.narrow(0, 0, 3);
  CHECK_THROWS_WITH(
      pipe.step(data.x, data.y, mse, std::map<std::string, at::Tensor>{{"mask", few}}),
      Catch::Contains("keyword: mask, rows: 7 and 3"));
  const c10::IValue words("words");
  CHECK_THROWS_AS(
      pipe.step(data.x, data.y, mse, std::map<std::string, c10::IValue>{{"mask", words}}),
      c10::TypeError);
  CHECK_FALSE(model.layers[0].weight.grad().defined());
}

TEST_CASE("A fixed schedule that runs out of memory is not repeated, and says so", "[pipeline]") {
  const Watchdog watchdog("a fixed schedule");
  const Layers model(2);
  const Data data;
  auto options = in_three();
  options.recompute = false;
  options.fixed_schedule = pipeline::gpipe(2, 3);
  bool full = true;
  options.before_action = [&](int rank, int index, const pipeline::Action&) {
    TORCH_CHECK_WITH(OutOfMemoryError, !(full && rank == 1 && index == 0), "planted");
  };
  Pipeline pipe(model.stages(), options);
  std::string text;
  try {
    pipe.step(data.x, data.y, mse);
  } catch (const BatchTooLarge& error) {
    text = error.what_without_backtrace();
    CHECK(error.facts().tried.size() == 1);
  }
  CHECK_THAT(text, Catch::Contains("the schedule is fixed, so no other number of microbatches was "
                                   "tried, on rank 1 of 2"));
  CHECK_THAT(text, Catch::Contains("Tried: 3 microbatches of "));
  CHECK_THROWS_AS(pipe.forward(data.x), BatchTooLarge);
  full = false;
  CHECK(pipe.step(data.x, data.y, mse).pieces == 3);
  CHECK(pipe.forward(data.x).tensors[0].size(0) == kRows);
  const auto two = data.x.narrow(0, 0, 2);
  CHECK(pipe.forward(two).tensors[0].size(0) == 2);
  CHECK(pipe.step(two, data.y.narrow(0, 0, 2), mse).pieces == 2);
  options.microbatches = 4;
  CHECK_THROWS_WITH(Pipeline(model.stages(), options), Catch::Contains("wanted: 2, 2, 4"));
}

namespace {
/// What a loader of packages looks like.
struct Doubles {
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, void* /*stream*/ = nullptr) {
    return {inputs.at(0) * 2};
  }
};
}  // namespace

TEST_CASE("A package is a stage for inference", "[pipeline]") {
  const Watchdog watchdog("a package");
  const Layers model(1);
  const Data data;
  const auto package = std::make_shared<Doubles>();
  const auto layer = make_stage(model.layers[0], model.layers[0].parameters());
  Pipeline behind({layer, package_stage(package)}, in_three());
  CHECK(at::allclose(behind.forward(data.x).tensors[0], model(data.x) * 2, 1e-12, 1e-14));
  CHECK_THROWS_WITH(behind.step(data.x, data.y, mse),
                    Catch::Contains("a package has no backward") && Catch::Contains("in stage 1"));
  CHECK_FALSE(model.layers[0].weight.grad().defined());
  Pipeline before({package_stage(package), layer}, in_three());
  before.step(data.x, data.y, mse);
  const auto gradients = copies(model.gradients());
  model.zero_grad();
  mse(model(data.x * 2), data.y).backward();
  CHECK(all_close(model.gradients(), gradients));
}

// tests/python/pipeline/test_pipeline_package.py makes the package, and runs this with its path.
TEST_CASE("A package of AOTInductor is a stage for inference", "[pipeline][package]") {
  using torch::inductor::AOTIModelPackageLoader;
  const char* const path = std::getenv("BRIMFUL_TEST_PACKAGE");
  if (path == nullptr) {
    WARN("skipped: needs a package (BRIMFUL_TEST_PACKAGE: unset)");
    return;
  }
  const Watchdog watchdog("a package of AOTInductor");
  const auto package = std::make_shared<AOTIModelPackageLoader>(path);
  const auto x = filled({kRows, 6}, 3);
  const auto shift = make_stage([](const at::Tensor& y) { return at::Tensor(y + 1); });
  Pipeline pipe({package_stage(package), shift}, in_three());
  const auto output = pipe.forward(x).tensors.at(0);
  CHECK(output.size(0) == kRows);
  CHECK(at::allclose(output, package->run({x}).at(0) + 1, 1e-6, 1e-6));
}

}  // namespace test_pipeline_stages
