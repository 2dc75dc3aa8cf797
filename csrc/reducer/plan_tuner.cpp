#include "reducer/plan_tuner.h"

#include <brimful/log.h>

#include <utility>

namespace brimful {

void PlanTuner::lay_out(BucketPlan plan) {
  hooks_.forget_counts();
  layout_.lay_out(std::move(plan), /*dense=*/hooks_.is_set(), /*encodes=*/!link_.alone);
}

void PlanTuner::start(bool tune_sizes) {
  planner_ = std::make_unique<Planner>(layout_.infos, layout_.plan_options, tune_sizes);
}

void PlanTuner::take_up() {
  if (next_) {
    try {
      lay_out(*next_);
    } catch (...) {  // the others have other buckets from now on: their sizes would not match
      link_.fail(std::current_exception());
      link_.abort();
      throw;
    }
    next_.reset();
  }
}

void PlanTuner::repeat() {
  if (!next_) {
    next_ = layout_.plan;
  }
}

void PlanTuner::separate_record() {
  if (layout_.plan_options.own_record) {
    return;
  }
  auto plan = next_ ? std::move(*next_) : layout_.plan;
  next_.reset();
  layout_.plan_options.own_record = true;
  layout_.plan_options.record_dtype = layout_.tail->dtype();
  if (!plan.buckets.back().parameters.empty()) {
    plan.buckets.push_back({{}, layout_.tail->dtype(), link_.device, false, false});
  }
  lay_out(std::move(plan));
  if (planner_) {
    start(planner_->tunes_sizes());
    proposal_.reset();
  }
}

std::string PlanTuner::key_of(uint32_t number) const {
  return link_.key + "plan/" + std::to_string(number);
}

void PlanTuner::propose(const Stopwatch& watch, int64_t step) {
  if (!planner_ || planner_->done() || next_ || proposal_ || arrivals_.empty()) {
    return;
  }
  if (!watch.last_is_known()) {
    return;
  }
  proposal_ = planner_->observe(layout_.plan, arrivals_, watch.last_step(), watch.span_ms());
  if (proposal_) {
    ++proposals_;
    const auto text = to_json(*proposal_);
    try {
      link_.store->set(key_of(proposals_), text);
    } catch (const std::exception& e) {
      log(LogLevel::warning, std::string("the bucket plan stays as it is: ") + e.what());
      proposal_.reset();
      planner_.reset();
      return;
    }
  }
  if (planner_->done() && !planner_->report().empty()) {
    log(LogLevel::info,
        "bucket sizes tuned in step " + std::to_string(step) + "\n" + planner_->report());
  }
}

void PlanTuner::note_agreed(uint32_t number) {
  if (number == 0) {
    return;
  }
  if (link_.rank == 0) {
    next_ = std::move(proposal_);
    proposal_.reset();
    return;
  }
  const auto text = link_.store->get(key_of(number));
  next_ = plan_from_json({text.begin(), text.end()}, layout_.infos, layout_.plan_options);
}

}  // namespace brimful
