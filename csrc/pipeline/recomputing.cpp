// The rung below one row: stages that run their forward again in backward, since memory ran out with the smallest microbatches.
#include "pipeline/recomputing.h"

#include <brimful/log.h>

#include <algorithm>
#include <utility>

#include "pipeline/report.h"

namespace brimful::pipeline {
namespace {
std::string number_and_name(const Stage& stage, int number) {
  return std::to_string(number) + (stage.name.empty() ? "" : " (" + stage.name + ")");
}
}  // namespace

Recomputing::Recomputing(const PipelineOptions& options, const Executor& executor,
                         const std::vector<int>& numbers, int stages)
    : options_(options), executor_(executor), refused_(numbers.size(), false) {
  const auto& wanted = options.recomputed;
  for (const auto number : wanted) {
    TORCH_CHECK_VALUE(number >= 0 && number < stages,
                      "there is no such stage to recompute (stage: ", number, ", stages: ", stages,
                      "); stages are numbered from 0");
  }
  for (const auto number : numbers) {
    const bool chosen =
        options.recompute_all || std::find(wanted.begin(), wanted.end(), number) != wanted.end();
    all_.push_back(chosen ? Recompute::compared : Recompute::no);
  }
}

// The first time the stage that holds most, then all: a device has two attempts more at most.
std::vector<size_t> Recomputing::next(const Call& call, const StepResult& result) const {
  const auto& failure = result.failure;
  const bool ran_out =
      failure && failure->kind == Status::out_of_memory && failure->index >= 0 && call.trains;
  if (!ran_out || !options_.recompute || options_.max_retries == 0 || call.refused) {
    return {};
  }
  const auto numbers = stage_numbers(executor_, call.order);
  const auto placed = rank_of_stage(call.order);
  const auto device_of = [&](int stage) {
    return options_.devices.at(options_.peers ? 0 : placed.at(stage));
  };
  std::vector<size_t> left;
  bool any = false;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (device_of(numbers[i]) == device_of(failure->action.stage)) {
      any |= all_[i] != Recompute::no;
      if (all_[i] == Recompute::no && !refused_[i]) {
        left.push_back(i);
      }
    }
  }
  if (any || left.empty()) {
    return left;
  }
  const auto held = [&](size_t i) {
    const auto stage = numbers[i];
    return std::make_pair(result.peak_live_bytes.at(stage), stage == failure->action.stage);
  };
  return {*std::max_element(left.begin(), left.end(),
                            [&](size_t a, size_t b) { return held(a) < held(b); })};
}

bool Recomputing::is_refused(const StepResult& result) {
  const auto& failure = result.failure;
  return failure && failure->index >= 0 && failure->kind == Status::error &&
         !result.refusals.empty() && !result.refusals.at(failure->action.stage).empty();
}

bool Recomputing::drop_refused(const Call& call, const StepResult& result) {
  const auto numbers = stage_numbers(executor_, call.order);
  bool any = false;
  for (size_t i = 0; i < all_.size() && !result.refusals.empty(); ++i) {
    const auto& refusal = result.refusals.at(numbers[i]);
    if (!refusal.empty()) {
      any = refused_[i] = true;
      all_[i] = Recompute::no;
      log(LogLevel::warning, "stage " + number_and_name(executor_.stages()[i], numbers[i]) +
                                 " cannot be recomputed in backward: " + refusal +
                                 "; the step is repeated without that");
    }
  }
  return any;
}

std::string Recomputing::add(const Call& call, const StepResult& result) {
  const auto more = next(call, result);
  const auto numbers = stage_numbers(executor_, call.order);
  std::string names;
  for (const auto i : more) {
    all_[i] = Recompute::compared;
    names += (names.empty() ? "" : ", ") + number_and_name(executor_.stages()[i], numbers[i]);
  }
  return names.empty() ? "" : (more.size() > 1 ? "stages " : "stage ") + names;
}

void Recomputing::note_stood() {
  for (auto& how : all_) {
    how = how == Recompute::compared ? Recompute::yes : how;
  }
}

std::vector<std::string> Recomputing::names(const Schedule& order) const {
  const auto numbers = stage_numbers(executor_, order);
  std::vector<std::string> found;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i] != Recompute::no) {
      found.push_back("stage " + number_and_name(executor_.stages()[i], numbers[i]));
    }
  }
  return found;
}

std::vector<int> Recomputing::numbers(const Schedule& order) const {
  const auto numbers = stage_numbers(executor_, order);
  std::vector<int> found;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i] != Recompute::no) {
      found.push_back(numbers[i]);
    }
  }
  return found;
}

}  // namespace brimful::pipeline
