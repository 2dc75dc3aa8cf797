// A reducer goes on with another group, in place.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "reducer/agree.h"
#include "reducer/owners.h"
#include "reducer/reducer_state.h"

namespace brimful {
namespace {
/// By then the order of buckets is learned and their sizes are tuned; an earlier plan is learned again.
constexpr int64_t kLearnedAfter = 64;

/// What a rank has when it regroups. As long as a control record: gloo ends a process whose peer sends another size.
struct Standing {
  int64_t progress = 0;
  int64_t whole = 1;
  int64_t step = 0;
  int64_t plan_bytes = 0;
  int64_t unused[2] = {};
};
static_assert(sizeof(Standing) == kRecordBytes);

std::vector<Standing> exchange_standings(const Group& group, c10::Device device,
                                         const Standing& own) {
  std::vector<uint8_t> bytes(sizeof(own));
  std::memcpy(bytes.data(), &own, sizeof(own));
  std::vector<Standing> all;
  for (const auto& theirs : exchange_bytes(group, device, bytes)) {
    std::memcpy(&all.emplace_back(), theirs.data(), sizeof(own));
  }
  return all;
}

int source_of(const std::vector<Standing>& all) {
  int64_t furthest = all.front().progress;
  for (const auto& standing : all) {
    furthest = std::max(furthest, standing.progress);
  }
  const auto found = std::find_if(all.begin(), all.end(), [&](const Standing& standing) {
    return standing.progress == furthest && standing.whole != 0;
  });
  return found == all.end() ? -1 : static_cast<int>(found - all.begin());
}

/// Rank `source` gives it to all.
std::string share_text(const Group& group, c10::Device device, std::string text, int source,
                       int64_t size) {
  text.resize(size);
  auto bytes = at::empty({size}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  bytes = bytes.to(device);
  broadcast_from(source, group, {bytes});
  bytes = bytes.cpu();
  std::memcpy(text.data(), bytes.const_data_ptr(), text.size());
  return text;
}

/// Works of the old group may still write into its buffers.
void move_gradients(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      gradient = gradient.clone();
    }
  }
}

void require_between_steps(Engine& engine) {
  const auto lock = engine.attempt().lock();
  TORCH_CHECK_VALUE(
      engine.attempt().is_idle(),
      "a reducer was regrouped within a step (in a step: true); regroup it between steps");
  TORCH_CHECK_VALUE(
      !engine.hooks().is_set(),
      "a reducer with a communication hook cannot regroup, since the hook may hold the "
      "old group (communication hook: set); wrap the module again, or pass wire_dtype "
      "in place of the hook");
}

/// What is being handled, as all ranks raise it.
[[noreturn]] void throw_failed(const Group& group, int64_t step) {
  try {
    throw;
  } catch (const c10::ValueError&) {
    throw;  // PlanMismatch, on all ranks
  } catch (const std::exception& e) {
    try {
      group->abort();                  // the others wait for this rank
    } catch (const std::exception&) {  // it is broken
    }
    throw RankFailed(
        -1, step, Status::error,
        "a rank failed while the ranks formed a new group (cause: " + std::string(e.what()) +
            "); look at the other ranks' output, and form a group again or start the job again");
  }
}
}  // namespace

Regrouped Reducer::regroup(const Group& group, const RegroupOptions& given) {
  TORCH_CHECK_VALUE(group, "no process group to go on with (group: null)");
  require_between_steps(s_->engine);
  auto& link = s_->engine.link();
  if (link.world_size > 1) {
    link.abort();
  }
  const memory::UnlimitedEverywhere unlimited;  // all ranks do it, or none
  const auto device = link.device;
  const auto& parameters = this->parameters();
  auto options = s_->options;
  options.synchronise_at_start = false;
  Regrouped result;
  std::shared_ptr<State> next;
  disown(&s_->loop);  // it has nothing to settle with the new group
  try {
    const auto own_plan = this->step() >= kLearnedAfter ? plan() : options.plan;
    const auto all = exchange_standings(
        group, device,
        {given.progress, given.whole ? 1 : 0, this->step(), static_cast<int64_t>(own_plan.size())});
    int64_t step = 0;
    for (const auto& standing : all) {
      result.progress.push_back(standing.progress);
      result.whole.push_back(standing.whole != 0 ? 1 : 0);
      step = std::max(step, standing.step);
    }
    result.source = source_of(all);
    const int planner = std::max(result.source, 0);
    options.plan = share_text(group, device, own_plan, planner, all[planner].plan_bytes);
    next = State::make(parameters, s_->buffers, group, options);
    next->engine.attempt().go_on_at(step);
    if (given.synchronise && result.source >= 0) {
      broadcast_from(result.source, group, parameters);
      broadcast_from(result.source, group, options.frozen);
      broadcast_from(result.source, group, s_->buffers);
    }
    move_gradients(parameters);
  } catch (...) {
    State::own_parameters(s_);
    throw_failed(group, this->step());
  }
  next->options.plan = s_->options.plan;
  replace(std::move(next));
  return result;
}

void Reducer::replace(std::shared_ptr<State> next) {
  next->engine.link().count_on_from(s_->engine.link());
  next->loop.go_on_from(s_->loop);
  next->loop.belong_to(self_);
  s_->let_go();
  s_ = std::move(next);
  State::connect(s_);
}

bool Reducer::follow_group() {
  auto& engine = s_->engine;
  {
    const auto lock = engine.attempt().lock();
    if (!engine.attempt().is_idle() || s_->loop.is_retired() || !is_reconfigured(engine.link())) {
      return false;
    }
  }
  // All of the group together, since a process that joins makes all of its own before its first forward.
  for (const auto& loop : reducers_beside({}, engine.link().group.get())) {
    const auto reducer = loop->reducer();
    if (reducer && is_reconfigured(reducer->s_->engine.link())) {
      reducer->follow();
    }
  }
  log(LogLevel::info, "goes on in a group that was reconfigured (rank: " + std::to_string(rank()) +
                          ", world size: " + std::to_string(world_size()) + ")");
  return true;
}

void Reducer::follow() {
  auto& hooks = s_->engine.hooks();
  const auto group = s_->engine.link().group;
  const auto& parameters = this->parameters();
  const memory::UnlimitedEverywhere unlimited;  // all ranks do it, or none
  auto options = s_->options;
  options.synchronise_at_start = false;
  std::shared_ptr<State> next;
  disown(&s_->loop);  // it has nothing to settle with the new members
  try {
    next = State::make(parameters, s_->buffers, group, options);
    if (hooks.is_set()) {
      next->require_same_hook(s_->hook);
    }
    move_gradients(parameters);
  } catch (...) {
    State::own_parameters(s_);
    throw_failed(group, this->step());
  }
  next->hook = s_->hook;
  if (hooks.is_set()) {
    next->engine.set_hook(hooks.take());
  }
  replace(std::move(next));
}

void prepare_forward(Reducer& reducer) {
  if (at::GradMode::is_enabled() && reducer.loop().sync()) {
    static_cast<Participant&>(reducer).follow_group();
  }
  reducer.loop().prepare_forward();
}

void begin_scope(Reducer& reducer) {
  if (reducer.loop().sync()) {
    static_cast<Participant&>(reducer).follow_group();
  }
  reducer.loop().begin_scope();
}

}  // namespace brimful
