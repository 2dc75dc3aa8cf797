// How all ranks come to the same bucket plan without a collective: rank 0 leaves a plan in the store and its number in
// its control record; a step that all ranks accept makes all of them take it up when the next step begins.
#include <brimful/log.h>

#include "reducer/reducer_state.h"

namespace brimful {

void Reducer::State::propose_plan() {
  if (!planner || planner->done() || next_plan || proposal || arrivals.empty()) {
    return;
  }
  if (!watch.last_is_known()) {
    return;
  }
  proposal = planner->observe(plan, arrivals, watch.last_step(), watch.span_ms());
  if (proposal) {
    ++proposals;
    const auto text = to_json(*proposal);
    try {
      store->set(key + "plan/" + std::to_string(proposals), text);
    } catch (const std::exception& e) {
      log(LogLevel::warning, std::string("the bucket plan stays as it is: ") + e.what());
      proposal.reset();
      planner.reset();
      return;
    }
  }
  if (planner->done() && !planner->report().empty()) {
    log(LogLevel::info,
        "bucket sizes tuned in step " + std::to_string(step) + "\n" + planner->report());
  }
}

void Reducer::State::hear_of_plan(uint32_t number) {
  if (number == 0) {
    return;
  }
  if (rank == 0) {
    next_plan = std::move(proposal);
    proposal.reset();
    return;
  }
  const auto text = store->get(key + "plan/" + std::to_string(number));
  next_plan = plan_from_json({text.begin(), text.end()}, infos, plan_options);
}

void Reducer::take_up_plan() {
  auto& s = *s_;
  if (s.next_plan) {
    try {
      s.lay_out(*s.next_plan);
    } catch (...) {  // the others have other buckets from now on: their sizes would not match
      s.broken = std::current_exception();
      abort_group();
      throw;
    }
    s.next_plan.reset();
  }
}

std::string Reducer::plan() const {
  return to_json(s_->plan);
}

std::string Reducer::describe_plan() const {
  const auto& s = *s_;
  return to_string(s.plan, s.infos) + (s.planner ? s.planner->report() : "");
}

}  // namespace brimful
