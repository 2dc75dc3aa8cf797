#include "reducer/plan_tuner.h"

#include <brimful/log.h>

#include <utility>

namespace brimful {

void PlanTuner::start(const BucketSet& layout, bool tune_sizes) {
  planner_ = std::make_unique<Planner>(layout.infos, layout.plan_options, tune_sizes);
}

void PlanTuner::restart(const BucketSet& layout) {
  if (planner_) {
    start(layout, planner_->tunes_sizes());
    proposal_.reset();
  }
}

std::string PlanTuner::key_of(uint32_t number) const {
  return link_.key + "plan/" + std::to_string(number);
}

void PlanTuner::propose(const BucketSet& layout, const Stopwatch& watch, int64_t step) {
  if (!planner_ || planner_->done() || next_ || proposal_ || arrivals_.empty()) {
    return;
  }
  if (!watch.last_is_known()) {
    return;
  }
  proposal_ = planner_->observe(layout.plan, arrivals_, watch.last_step(), watch.span_ms());
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

void PlanTuner::note_agreed(const BucketSet& layout, uint32_t number) {
  if (number == 0) {
    return;
  }
  if (link_.rank == 0) {
    next_ = std::move(proposal_);
    proposal_.reset();
    return;
  }
  const auto text = link_.store->get(key_of(number));
  next_ = plan_from_json({text.begin(), text.end()}, layout.infos, layout.plan_options);
}

}  // namespace brimful
