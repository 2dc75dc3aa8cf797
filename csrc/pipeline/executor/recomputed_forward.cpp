// A stage that is recomputed: its forward is a checkpoint, whose outputs are the stage's and what it has stashed.
#include "pipeline/executor/recomputed_forward.h"

#include <ATen/ATen.h>
#include <brimful/ladder/checkpoint_call.h>
#include <brimful/memory/stats.h>
#include <brimful/step/forward_state.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ladder/refuse_second_run.h"
#include "pipeline/backward/graph_cut.h"

namespace brimful::pipeline {
namespace {
using ladder::refuse_second_run;

thread_local bool inside_second_run = false;

class InsideSecondRun {
 public:
  InsideSecondRun() : outer_(std::exchange(inside_second_run, true)) {}
  ~InsideSecondRun() { inside_second_run = outer_; }
  InsideSecondRun(const InsideSecondRun&) = delete;
  InsideSecondRun& operator=(const InsideSecondRun&) = delete;

 private:
  bool outer_;
};

int64_t count_of_changes(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<int64_t>(tensor._version()) : -1;
}

std::vector<int64_t> counts_of_changes(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    versions.push_back(count_of_changes(tensor));
  }
  return versions;
}

bool has_same_values(const at::Tensor& a, const at::Tensor& b) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  return at::equal(a, b) ||
         (a.sizes() == b.sizes() && (a.eq(b) | (a.ne(a) & b.ne(b))).all().item<bool>());
}

/// An output of the first forward, apart from its graph.
struct FirstOutput {
  at::Tensor tensor;
  int64_t version;
};

/// What a second forward is given.
struct SecondForward {
  const Stage& stage;
  Value input;
  std::shared_ptr<SecondRun> names;  ///< may be null
  std::shared_ptr<GivenKeywords> keywords;
  std::vector<FirstOutput> outputs;  ///< to compare with
  std::function<bool()> drew_together;

  std::vector<at::Tensor> run() const;
  void compare(const std::vector<at::Tensor>& found) const;
};

std::vector<at::Tensor> SecondForward::run() const {
  const InsideSecondRun scope;
  if (names && !names->begin()) {
    refuse_second_run("its forward registers a buffer; register it in the module's constructor");
  }
  const auto as_now = c10::make_scope_exit([this] {
    if (names) {
      names->end();
    }
  });
  SkipsAgain skips;
  const KeywordScope same(keywords);
  auto found = stage.forward(input).tensors;
  for (auto& tensor : skips.stashed()) {
    found.push_back(std::move(tensor));
  }
  if (!outputs.empty()) {
    compare(found);
    if (has_reentrant_checkpoint(found)) {
      refuse_second_run("it has a reentrant checkpoint; checkpoint with use_reentrant=False");
    }
  }
  return found;
}

void SecondForward::compare(const std::vector<at::Tensor>& found) const {
  for (size_t i = 0; i < std::min(outputs.size(), found.size()); ++i) {
    const auto& [tensor, version] = outputs[i];
    const bool comparable = tensor.defined() && found[i].defined() &&
                            tensor.scalar_type() == found[i].scalar_type() &&
                            tensor.layout() == at::kStrided && count_of_changes(tensor) == version;
    if (comparable && !has_same_values(tensor, found[i].detach()) && !drew_together()) {
      refuse_second_run("its forward returned other values when it ran again (output: ", i,
                        ", shape: ", tensor.sizes(), ")");
    }
  }
}

/// The first forward, and what it returns together.
std::vector<at::Tensor> run_first(const RecomputedForward& work, const Value& input,
                                  Value& output) {
  const auto versions = counts_of_changes(input.tensors);
  const auto hidden = work.hidden_state ? work.hidden_state() : 0;
  output = work.stage.forward(input);
  if (counts_of_changes(input.tensors) != versions) {
    refuse_second_run("its forward changes its input in place");
  }
  if (work.hidden_state && work.hidden_state() != hidden) {
    refuse_second_run("its forward draws random numbers that are not torch's");
  }
  auto all = output.tensors;
  for (const auto& [name, tensor] : work.skips.stashed) {
    all.push_back(tensor);
  }
  return all;
}
}  // namespace

bool runs_again() {
  return inside_second_run;
}

Value forward_to_recompute(const RecomputedForward& work, const Value& input) {
  const auto kept = std::shared_ptr<SecondForward>(
      new SecondForward{work.stage, input, nullptr, work.keywords, {}, work.drew_together});
  if (work.stage.names) {
    // What changes in place, checkpoint() sees.
    kept->names = std::make_shared<SecondRun>(work.stage.names, std::vector<at::Tensor>());
  }
  work.skips.repeated = true;
  Value output;
  bool ran = false;
  const auto first = [&] {
    if (std::exchange(ran, true)) {
      refuse_second_run("its forward runs a backward of its own");
    }
    return run_first(work, input, output);
  };
  auto found = brimful::detail::run_checkpoint(
      {first, [kept] { return kept->run(); }, input.tensors,
       [] { return std::vector<std::pair<std::string, at::Tensor>>(); }},
      {});
  if (work.compared) {
    for (const auto& tensor : found) {
      const auto cut = tensor.defined() ? tensor.detach() : tensor;
      kept->outputs.push_back({cut, count_of_changes(cut)});
    }
  }
  auto stashed = found.begin() + static_cast<int64_t>(output.tensors.size());
  for (auto& named : work.skips.stashed) {
    named.tensor = std::move(*stashed++);
  }
  found.resize(output.tensors.size());
  output.tensors = std::move(found);
  return output;
}

}  // namespace brimful::pipeline
