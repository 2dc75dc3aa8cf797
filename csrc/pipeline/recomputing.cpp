// The rungs below one row: stages that are recomputed, or offloaded, since memory ran out with the smallest microbatches.
#include "pipeline/recomputing.h"

#include <brimful/log.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "ladder/put_aside.h"

namespace brimful::pipeline {
namespace {
constexpr double kMoreRoom = 1 + 1.0 / 32;

}  // namespace

Recomputing::Recomputing(const PipelineOptions& options, const RetryPolicy& policy,
                         std::vector<Own> own, size_t stages)
    : options_(options), policy_(policy), own_(std::move(own)), refused_(own_.size(), false) {
  const auto& wanted = options.recomputed;
  for (const auto number : wanted) {
    TORCH_CHECK_VALUE(number >= 0 && static_cast<size_t>(number) < stages,
                      "there is no such stage to recompute (stage: ", number, ", stages: ", stages,
                      "); stages are numbered from 0");
  }
  for (const auto& stage : own_) {
    const bool chosen = options.recompute_all ||
                        std::find(wanted.begin(), wanted.end(), stage.number) != wanted.end();
    all_.push_back(chosen ? StageRung::compared : StageRung::none);
  }
}

double Recomputing::room(c10::Device device) const {
  const auto bytes = policy_.room(device);
  return bytes ? static_cast<double>(*bytes) : std::numeric_limits<double>::infinity();
}

bool Recomputing::can_offload(c10::Device device) const {
  if (options_.offload && !can_offload_) {
    can_offload_ = ladder::can_put_aside(device);
  }
  return options_.offload && *can_offload_;
}

Recomputing::Rung Recomputing::next(const Call& call, const StepResult& result) const {
  const auto& failure = result.failure;
  const bool ran_out =
      failure && failure->kind == Status::out_of_memory && failure->index >= 0 && call.trains;
  if (!ran_out || options_.max_retries == 0 || call.refused) {
    return {};
  }
  const auto failed_on = failure->action.stage;
  const auto at = std::find_if(own_.begin(), own_.end(),
                               [&](const Own& stage) { return stage.number == failed_on; });
  Rung recomputed{StageRung::compared, {}, at->device};
  Rung offloaded{StageRung::offloaded, {}, at->device};
  bool any = false;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (own_[i].device == at->device) {
      any |= all_[i] != StageRung::none;
      if (all_[i] == StageRung::none && !refused_[i] && options_.recompute) {
        recomputed.stages.push_back(i);
      }
      if (!is_offloaded(all_[i])) {
        offloaded.stages.push_back(i);
      }
    }
  }
  if (recomputed.stages.empty()) {
    return !offloaded.stages.empty() && can_offload(offloaded.device) ? offloaded : Rung();
  }
  if (!any) {
    const auto held = [&](size_t i) {
      const auto stage = own_[i].number;
      return std::make_pair(result.peak_live_bytes.at(stage), stage == failed_on);
    };
    const auto& left = recomputed.stages;
    recomputed.stages = {*std::max_element(left.begin(), left.end(),
                                           [&](size_t a, size_t b) { return held(a) < held(b); })};
  }
  return recomputed;
}

bool Recomputing::is_refused(const StepResult& result) {
  const auto& failure = result.failure;
  return failure && failure->index >= 0 && failure->kind == Status::error &&
         !result.refusals.empty() && !result.refusals.at(failure->action.stage).empty();
}

bool Recomputing::drop_refused(const StepResult& result) {
  bool any = false;
  for (size_t i = 0; i < all_.size() && !result.refusals.empty(); ++i) {
    const auto& refusal = result.refusals.at(own_[i].number);
    if (!refusal.empty()) {
      any = refused_[i] = true;
      all_[i] = StageRung::none;
      log(LogLevel::warning, "stage " + own_[i].name + " cannot be recomputed in backward: " +
                                 refusal + "; the step is repeated without that");
    }
  }
  return any;
}

std::string Recomputing::names_of(const std::vector<size_t>& stages) const {
  std::string names;
  for (const auto i : stages) {
    names += (names.empty() ? "" : ", ") + own_[i].name;
  }
  return (stages.size() > 1 ? "stages " : "stage ") + names;
}

std::string Recomputing::add(const Call& call, const StepResult& result) {
  const auto more = next(call, result);
  if (more.stages.empty()) {
    return "";
  }
  auto& begun = begun_.emplace_back(Begun{more.device, room(more.device), {}});
  for (const auto i : more.stages) {
    begun.before.emplace_back(i, std::exchange(all_[i], more.rung));
  }
  return names_of(more.stages) +
         (is_offloaded(more.rung) ? " offloaded" : " recomputed in backward");
}

void Recomputing::come_back(bool trains) {
  std::vector<c10::Device> seen;
  for (auto i = trains ? begun_.size() : 0; i-- > 0;) {
    const auto device = begun_[i].device;
    if (std::find(seen.begin(), seen.end(), device) != seen.end()) {
      continue;
    }
    seen.push_back(device);
    if (room(device) > kMoreRoom * begun_[i].room) {
      std::vector<size_t> stages;
      for (const auto& [stage, before] : begun_[i].before) {
        all_[stage] = refused_[stage] ? StageRung::none : before;
        stages.push_back(stage);
      }
      log(LogLevel::info, "there is more room than when memory ran out: from this step on " +
                              names_of(stages) + " run as before that");
      begun_.erase(begun_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

void Recomputing::note_stood() {
  for (auto& rung : all_) {
    rung = rung == StageRung::compared ? StageRung::recomputed : rung;
  }
}

StageRung Recomputing::of(int stage) const {
  const auto at =
      std::find_if(own_.begin(), own_.end(), [&](const Own& each) { return each.number == stage; });
  return at == own_.end() ? StageRung::none : all_[static_cast<size_t>(at - own_.begin())];
}

void Recomputing::mark(std::vector<StageNote>& notes) const {
  for (size_t i = 0; i < notes.size(); ++i) {
    const auto rung = of(static_cast<int>(i));
    notes[i].recomputed = is_recomputed(rung);
    notes[i].offloaded = is_offloaded(rung);
  }
}

StepRungs Recomputing::named() const {
  StepRungs rungs;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i] != StageRung::none) {
      auto& names = is_offloaded(all_[i]) ? rungs.offloaded : rungs.recomputed;
      names.push_back("stage " + own_[i].name);
    }
  }
  return rungs;
}

std::vector<Recomputing::Own> own_stages(const std::vector<Stage>& stages,
                                         const std::vector<int>& numbers,
                                         const std::vector<c10::Device>& devices) {
  std::vector<Recomputing::Own> own;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto& name = stages.at(i).name;
    own.push_back({numbers[i], devices[i],
                   std::to_string(numbers[i]) + (name.empty() ? "" : " (" + name + ")")});
  }
  return own;
}

}  // namespace brimful::pipeline
