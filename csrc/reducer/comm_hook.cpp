#include <brimful/error.h>

#include <algorithm>

#include "reducer/reducer_state.h"

namespace brimful {

void Reducer::register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook,
                                 const std::string& name) {
  auto& s = *s_;
  TORCH_CHECK_VALUE(hook, "there is no hook to register (hook: null)");
  TORCH_CHECK_VALUE(!s.hook, "a reducer has one communication hook (registered already: true)");
  TORCH_CHECK_VALUE(!s.wire_dtype, "a hook decides itself how gradients travel (wire_dtype: ",
                    c10::toString(*s.wire_dtype), "); leave wire_dtype out");
  settle();
  const std::lock_guard<std::mutex> lock(s.mutex);
  TORCH_CHECK_VALUE(s.mode == State::Mode::idle,
                    "a hook is registered between steps (in a step: true)");
  // Another hook, or none, would send other sizes: gloo kills a process for that.
  std::vector<uint8_t> own(name.begin(), name.end());
  own.resize(64);
  const auto all = exchange_bytes(s.group, s.device, own);
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& theirs) { return theirs != all[0]; });
  if (other != all.end()) {
    throw PlanMismatch("the ranks' communication hooks differ (rank 0: " +
                       std::string(all[0].begin(), std::find(all[0].begin(), all[0].end(), 0)) +
                       ", rank " + std::to_string(other - all.begin()) + ": " +
                       std::string(other->begin(), std::find(other->begin(), other->end(), 0)) +
                       "); register the same on every rank");
  }
  s.hook = std::move(hook);
  s.alone = false;
  if (!s.plan_options.own_record) {
    // The hook gets whole buckets, so the control record moves into one of its own.
    auto plan = s.next_plan ? std::move(*s.next_plan) : s.plan;
    s.next_plan.reset();
    s.plan_options.own_record = true;
    s.plan_options.record_dtype = s.tail->dtype();
    if (!plan.buckets.back().parameters.empty()) {
      plan.buckets.push_back({{}, s.tail->dtype(), s.device, false, false});
    }
    s.lay_out(std::move(plan));
    if (s.planner) {
      s.planner = std::make_unique<Planner>(s.infos, s.plan_options, s.planner->tunes_sizes());
      s.proposal.reset();
    }
  }
}

}  // namespace brimful
