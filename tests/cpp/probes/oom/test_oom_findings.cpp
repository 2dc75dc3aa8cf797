#include <brimful/probes/oom_report.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string>

#include "probes/oom/attention_line.h"
#include "probes/oom/blocks.h"
#include "support/catch.h"
#include "support/page_data.h"

namespace test_oom_findings {

using namespace brimful::probes;
using brimful::memory::Category;
using brimful::memory::Phase;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// 90 MiB in use, 10 asked for, 1 too much.
OomFacts facts_in(Phase phase) {
  OomFacts facts;
  facts.used_bytes = 90 * kMiB;
  facts.request_bytes = 10 * kMiB;
  facts.limit_bytes = 99 * kMiB;
  facts.phase = phase;
  facts.place = "train.py:7";
  facts.grad_enabled = true;
  return facts;
}

int64_t& of(OomFacts& facts, Category category) {
  return facts.by_category[static_cast<size_t>(category)];
}

OomFacts forward_with_activations() {
  auto facts = facts_in(Phase::forward);
  of(facts, Category::activations) = 50 * kMiB;
  of(facts, Category::parameters) = 40 * kMiB;
  return facts;
}

OomFinding first(const OomFacts& facts) {
  const auto found = findings(facts);
  REQUIRE_FALSE(found.empty());
  return found.front();
}

bool has(const OomFacts& facts, OomCause cause) {
  const auto found = findings(facts);
  return std::any_of(found.begin(), found.end(), [&](const auto& f) { return f.cause == cause; });
}

}  // namespace

TEST_CASE("activations count with the request of their forward, at their largest line",
          "[oom_report]") {
  auto facts = forward_with_activations();
  facts.sites = {{"init.py:1", Phase::other, 40 * kMiB, 1}, {"net.py:3", Phase::forward, 5, 1}};
  CHECK(first(facts).cause == OomCause::activations);
  CHECK(first(facts).bytes == 60 * kMiB);
  CHECK_THAT(first(facts).text, Catch::Contains("60.0 MiB, most of them at net.py:3"));
  facts.earlier_forward = true;
  CHECK(first(facts).cause == OomCause::large_batch);
  facts.phase = Phase::other;  // the batch itself
  CHECK(first(facts).bytes == 60 * kMiB);
  CHECK_THAT(first(facts).text, Catch::Contains("need 60.0 MiB, most of them at net.py:3"));
  facts.request_bytes = 70 * kMiB;
  CHECK_THAT(first(facts).text, Catch::Contains("need 120.0 MiB, most of them at train.py:7"));
  facts.request_bytes = 10 * kMiB;
  facts.phase = Phase::backward;
  CHECK(first(facts).bytes == 50 * kMiB);
}

TEST_CASE("evaluation is known by its models, metrics left out", "[oom_report]") {
  auto facts = forward_with_activations();
  facts.program.emplace();
  facts.program->models = {{"Net", 40 * kMiB, false}, {"Metric", kMiB, true}};
  CHECK(first(facts).cause == OomCause::no_grad);
  facts.grad_enabled = false;
  CHECK(first(facts).cause == OomCause::activations);
  facts.grad_enabled = true;
  facts.program->models[1].bytes = 30 * kMiB;
  CHECK_FALSE(has(facts, OomCause::no_grad));
}

TEST_CASE("what grows comes before what is merely large", "[oom_report]") {
  auto facts = forward_with_activations();
  facts.growing = {{"train.py:8", 4, 20 * kMiB}, {"train.py:9", 4, 10 * kMiB}};
  CHECK(first(facts).cause == OomCause::growth);
  CHECK(first(facts).bytes == 30 * kMiB);
  CHECK_THAT(first(facts).text, Catch::Contains("30.0 MiB of 4 steps, most of it from train.py:8"));
  facts.growing = {{"train.py:8", 4, 19 * kMiB}};  // less than a fifth
  CHECK_FALSE(has(facts, OomCause::growth));
}

TEST_CASE("one operator that asks for more than all the rest is to blame", "[oom_report]") {
  auto facts = facts_in(Phase::forward);
  facts.used_bytes = 40 * kMiB;
  facts.request_bytes = 60 * kMiB;
  CHECK(first(facts).cause == OomCause::temporary);
  facts.earlier_forward = true;
  CHECK_FALSE(has(facts, OomCause::temporary));
  facts.earlier_forward = false;
  facts.phase = Phase::other;
  CHECK_FALSE(has(facts, OomCause::temporary));
  facts.phase = Phase::backward;
  facts.request_bytes = 30 * kMiB;
  CHECK_FALSE(has(facts, OomCause::temporary));
  facts.node = "EmbeddingBackward0";
  CHECK(first(facts).cause == OomCause::embedding_gradient);
}

TEST_CASE("gradients of the step before are a fault in a forward alone", "[oom_report]") {
  auto facts = forward_with_activations();
  facts.kept_gradient_bytes = 20 * kMiB;
  CHECK(first(facts).cause == OomCause::gradients_kept);
  facts.limit_bytes = 70 * kMiB;  // without them it would not fit either
  CHECK(first(facts).cause == OomCause::activations);
  CHECK(has(facts, OomCause::gradients_kept));
  facts.phase = Phase::backward;
  CHECK_FALSE(has(facts, OomCause::gradients_kept));
}

TEST_CASE("what stands is distinguished: state, a model, another model", "[oom_report]") {
  auto facts = facts_in(Phase::optimizer);
  of(facts, Category::parameters) = 60 * kMiB;
  of(facts, Category::optimizer_state) = 20 * kMiB;
  facts.program.emplace();
  facts.program->optimizers = {"Adam"};
  CHECK(first(facts).cause == OomCause::optimizer_state);
  CHECK_THAT(first(facts).text, Catch::Contains("the state of Adam needs 30.0 MiB"));

  facts = facts_in(Phase::other);
  of(facts, Category::parameters) = 80 * kMiB;
  CHECK(first(facts).cause == OomCause::model);
  CHECK(first(facts).bytes == 90 * kMiB);  // with the parameter that was asked for
  facts.device = "cuda:0";
  facts.others_bytes = 95 * kMiB;
  CHECK(first(facts).cause == OomCause::model);  // it would not fit beside them either

  facts = facts_in(Phase::backward);
  of(facts, Category::parameters) = 70 * kMiB;
  facts.step_gradient_bytes = 5 * kMiB;
  facts.program.emplace();
  facts.program->models = {{"Teacher", 40 * kMiB, false}, {"Student", 30 * kMiB, true}};
  CHECK(first(facts).cause == OomCause::other_model);
  CHECK(first(facts).bytes == 30 * kMiB);
  CHECK_THAT(first(facts).text, Catch::Contains("the largest (Teacher)"));
  facts.limit_bytes = 60 * kMiB;  // without it the rest would not fit either
  CHECK(first(facts).cause == OomCause::model);
  CHECK(first(facts).bytes == 55 * kMiB);
}

TEST_CASE("gradients of activations are activations', not the model's", "[oom_report]") {
  auto facts = facts_in(Phase::backward);
  of(facts, Category::parameters) = 20 * kMiB;
  of(facts, Category::activations) = 20 * kMiB;
  facts.flow_bytes = 30 * kMiB;
  facts.request_flows = true;
  CHECK(first(facts).cause == OomCause::activations);
  CHECK(first(facts).bytes == 60 * kMiB);
  CHECK_THAT(first(facts).text, Catch::Contains("activations and their gradients hold 60.0 MiB"));
  const auto found = findings(facts);
  CHECK(found.back().cause == OomCause::model);
  CHECK(found.back().bytes == 20 * kMiB);
}

TEST_CASE("blocks of a backward are parameters' gradients by label or size, up to the parameters",
          "[oom_report]") {
  auto facts = facts_in(Phase::backward);
  facts.request_bytes = 12 * kMiB;
  std::array<char, 6> places{};
  facts.program.emplace();
  facts.program->labels = {{&places[0], 4 * kMiB, Category::parameters},
                           {&places[1], 6 * kMiB, Category::parameters},
                           {&places[2], 4 * kMiB, Category::gradients}};
  std::vector<brimful::memory::LiveBlock> blocks(6);
  const std::array<int64_t, 6> sizes{4, 6, 4, 6, 6, 7};
  for (size_t i = 0; i < blocks.size(); ++i) {
    blocks[i].data = &places[i];
    blocks[i].bytes = sizes[i] * kMiB;
    blocks[i].phase = i < 2 ? Phase::other : Phase::backward;
  }
  read_blocks(facts, blocks);
  CHECK(facts.step_gradient_bytes == 10 * kMiB);  // of two that have a parameter's size, one is
  CHECK(facts.flow_bytes == 13 * kMiB);
  CHECK(facts.request_flows);
  CHECK(facts.data_bytes == 0);  // parameters are none
  blocks.resize(3);
  facts.request_bytes = 6 * kMiB;
  read_blocks(facts, blocks);
  CHECK_FALSE(facts.request_flows);
  facts.request_bytes = 4 * kMiB + 100;  // as CUDA rounds
  read_blocks(facts, blocks);
  CHECK_FALSE(facts.request_flows);
}

TEST_CASE("data of the first step is named with its line", "[oom_report]") {
  auto facts = facts_in(Phase::other);
  facts.program.emplace();
  brimful::memory::LiveBlock block;
  block.data = &facts;
  block.bytes = 45 * kMiB;
  block.site = brimful::memory::site_id({"train.py", 3, "load"});
  facts.step = 3;
  facts.earlier_forward = true;
  read_blocks(facts, {block});
  CHECK(first(facts).cause == OomCause::data);
  CHECK_THAT(first(facts).text, Catch::Contains("45.0 MiB, most of them at train.py:3 (load)"));
  auto of_a_step = facts_in(Phase::other);
  of_a_step.program.emplace();
  block.step = 2;
  read_blocks(of_a_step, {block});
  CHECK(of_a_step.data_bytes == 0);
  // Before a forward a request is the model's while one is being made, else data.
  auto asked = facts_in(Phase::other);
  asked.request_bytes = 40 * kMiB;
  CHECK(first(asked).cause == OomCause::model);
  asked.program.emplace();
  CHECK(first(asked).cause == OomCause::data);
  asked.program->building = true;
  CHECK(first(asked).cause == OomCause::model);
}

TEST_CASE("attention is known by its line's text or its function's name", "[oom_report]") {
  const auto folder = std::filesystem::temp_directory_path();
  const auto path = folder / ("brimful_attention_" + std::to_string(::getpid()) + ".py");
  const std::vector<std::pair<const char*, bool>> lines{
      {"weights = (q @ k.transpose(-2, -1) / 8).softmax(-1)", true},
      {"scores = scores.masked_fill(mask, -inf)", true},
      {"x = self.attn(x, x, x)[0]", true},
      {"w = torch.matmul(query, key_states.transpose(2, 3))", true},
      {"y = x @ self.weight.T", false},
      {"y = x @ block.transpose(0, 1)", false},
      {"p = logits.log_softmax(-1)", false},
      {"score = metric(x)", false},
      {"", false}};
  {
    std::ofstream file(path);
    for (const auto& [line, expected] : lines) {
      file << line << "\n";
    }
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    CAPTURE(lines[i].first);
    CHECK(is_attention({path.string(), static_cast<int>(i) + 1, "f"}) == lines[i].second);
  }
  CHECK_FALSE(is_attention({path.string(), 100, "f"}));
  CHECK_FALSE(is_attention({path.string(), -1, "f"}));
  CHECK_FALSE(is_attention({"/nowhere/train.py", 1, "f"}));
  CHECK_FALSE(is_attention({folder.string(), 1, "f"}));
  CHECK_FALSE(is_attention({}));
  CHECK(is_attention({"", 0, "SelfAttention.forward"}));
  std::filesystem::remove(path);
}

TEST_CASE("attention is advised to keep no scores, and LBFGS to keep less", "[oom_report]") {
  auto facts = forward_with_activations();
  facts.attention = true;
  CHECK_THAT(first(facts).advice, Catch::Contains("scaled_dot_product_attention"));
  CHECK_THAT(first(facts).advice, !Catch::Contains("BatchSizer"));
  facts = facts_in(Phase::optimizer);
  of(facts, Category::optimizer_state) = 50 * kMiB;
  facts.program.emplace();
  facts.program->optimizers = {"LBFGS"};
  CHECK_THAT(first(facts).advice, Catch::Contains("history_size"));
  facts.program->optimizers = {"Adam"};
  CHECK_THAT(first(facts).advice, !Catch::Contains("history_size"));
}

TEST_CASE("other processes count on a device that is shared, and small parts nowhere",
          "[oom_report]") {
  auto facts = facts_in(Phase::forward);
  facts.others_bytes = 50 * kMiB;
  CHECK_FALSE(has(facts, OomCause::others));
  facts.device = "cuda:0";
  CHECK(first(facts).cause == OomCause::others);
  facts.others_bytes = 9 * kMiB;  // less than a tenth
  CHECK_FALSE(has(facts, OomCause::others));
}

TEST_CASE("fragments are to blame where they add up to the request", "[oom_report]") {
  auto facts = facts_in(Phase::other);
  facts.fragmentation.emplace();
  facts.fragmentation->free_bytes = 9 * kMiB;
  CHECK_FALSE(has(facts, OomCause::fragmentation));
  facts.fragmentation->free_bytes = 10 * kMiB;
  CHECK(first(facts).cause == OomCause::fragmentation);
  facts.fragmentation->splitter.emplace();
  facts.fragmentation->splitter->room_bytes = 12 * kMiB;
  CHECK_THAT(to_short_string(facts),
             Catch::Contains("since before tracking was on, split 12.0 MiB"));
}

TEST_CASE("the block that splits the room is named by its line", "[oom_report]") {
  auto facts = facts_in(Phase::other);
  facts.step = 5;
  facts.fragmentation.emplace();
  facts.fragmentation->splitter = SplittingBlock{{2 * kMiB, true, &facts}, 12 * kMiB, {}};
  brimful::memory::LiveBlock other;
  other.site = brimful::memory::site_id({"train.py", 3, "load"});
  auto kept = other;
  kept.data = &facts;
  kept.site = brimful::memory::site_id({"train.py", 31, "step"});
  read_blocks(facts, {other, kept});
  CHECK_THAT(to_short_string(facts),
             Catch::Contains("2.0 MiB alive of train.py:31 (step) split 12.0 MiB"));
}

TEST_CASE("a report's texts have its numbers", "[oom_report]") {
  auto facts = forward_with_activations();
  facts.used_bytes = 100 * kMiB;
  facts.tracked_bytes = 97 * kMiB;
  facts.largest_bytes = 4 * kMiB;
  facts.step = 3;
  facts.node = "ExpBackward0";
  facts.sites = {{"net.py:3", Phase::forward, 50 * kMiB, 1},
                 {"init.py:1", Phase::other, 40 * kMiB, 2}};
  facts.growing = {{"train.py:8", 4, 20 * kMiB}};
  facts.others_bytes = 7 * kMiB;
  facts.context_bytes = 5 * kMiB;
  facts.processes = {{"worker", 8, 6 * kMiB}};
  const auto brief = to_short_string(facts);
  CHECK_THAT(brief, Catch::Contains("at train.py:7 (forward, step 3, ExpBackward0)"));
  CHECK_THAT(brief, Catch::Contains("that fits: 4.0 MiB, short by 6.0 MiB"));
  CHECK_THAT(brief, Catch::Contains("In use: activations 50.0 MiB, parameters 40.0 MiB;"));
  CHECK_THAT(brief, Catch::Contains("50.0 MiB at net.py:3, forward, 1 tensor\n"));
  const auto all = to_string(facts);
  CHECK_THAT(all, Catch::Contains("100.0 MiB were in use of 99.0 MiB"));
  CHECK_THAT(all, Catch::Contains("40.0 MiB at init.py:1, other, 2 tensors"));
  CHECK_THAT(all, Catch::Contains("3.0 MiB from before tracking was on"));
  CHECK_THAT(all, Catch::Contains("5.0 MiB a step at train.py:8, for 4 steps"));
  CHECK_THAT(all, Catch::Contains("Beside the allocator this process holds 5.0 MiB"));
  CHECK_THAT(all, Catch::Contains("Other processes hold 7.0 MiB"));
  CHECK_THAT(all, Catch::Contains("worker (child, pid 8): 6.0 MiB"));
  const auto data = page_data(to_html(facts));
  CHECK(data["used_bytes"] == 100 * kMiB);
  CHECK(data["categories"].at(0)["bytes"] == 50 * kMiB);
  CHECK(data["causes"].at(0)["advice"] == findings(facts).front().advice);
  CHECK(data["text"] == all);
}

}  // namespace test_oom_findings
