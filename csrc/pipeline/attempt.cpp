// One attempt of a step: the actions, then the reducers' verdict over the replicas, then that of the pipeline's ranks.
// Each rank sends its pipeline the worst of what it and its replicas say, and so all ranks of all replicas end alike.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "base/fnv.h"
#include "pipeline/failure.h"
#include "pipeline/pipeline_state.h"
#include "sizer/loss_scale.h"
#include "step/agreement.h"
#include "step/failures.h"

namespace brimful::pipeline {
namespace {
/// Losses times weights; on another device than the CPU as a tensor, so that nothing waits.
at::Tensor weigh(const std::vector<PieceLoss>& losses, ControlRecord& record) {
  const memory::Unlimited unlimited;
  at::Tensor sum;
  for (const auto& [loss, weight] : losses) {
    if (weight > 0 && loss.is_cpu()) {
      record.loss_sum += loss.item<double>() * weight;
    } else if (weight > 0) {
      const auto weighted = loss.reshape({}).to(at::kDouble) * weight;
      sum = sum.defined() ? sum + weighted : weighted;
    }
    record.weight += weight;
  }
  return sum;
}

/// What BatchNorms have changed for a step's microbatches is undone at its end.
class NormsScope {
 public:
  NormsScope(std::vector<std::shared_ptr<StageNorms>>& norms, int64_t pieces) : norms_(norms) {
    for (const auto& each : norms_) {
      each->next = 0;
      each->pieces = pieces;
    }
  }
  ~NormsScope() {
    for (const auto& each : norms_) {
      if (each->pieces > 0) {
        each->pieces = 0;
        each->norms.after_step();
      }
    }
  }
  NormsScope(const NormsScope&) = delete;
  NormsScope& operator=(const NormsScope&) = delete;

 private:
  std::vector<std::shared_ptr<StageNorms>>& norms_;
};

/// Positive.
int64_t random_link_name() {
  std::random_device device;
  return static_cast<int64_t>((uint64_t{device()} << 32 | device()) >> 1) | 1;
}

/// Never 0.
int64_t number_of(const std::string& text) {
  Fnv<uint64_t> hash;
  hash.add(text);
  return static_cast<int64_t>(hash.value() >> 1) | 1;
}
}  // namespace

ActionFailure Pipeline::State::failure_outside(std::exception_ptr error) const {
  if (options.translate) {
    error = options.translate(std::move(error));
  }
  return ActionFailure(options.peers ? options.peers->rank() : 0, -1, std::move(error));
}

void Pipeline::State::begin(Call& call) {
  doing = "a call begins: the ranks compare what they were given";
  // Later steps have as many microbatches as the first one on all ranks, until memory runs out: then they depend on the
  // rows, and on the memory of each rank. Those of inference depend on the rows, for a batch may have fewer.
  if (options.peers && (!agreed_.made || policies.of(call.trains).piece_rows() > 0 ||
                        !call.trains || options.peers->wants_links())) {
    meet(call);
  }
  find_ref(call);
  std::optional<ValueOnHost> scale;
  if (options.scaler != nullptr && options.scaler->enabled() && call.group.world_size() > 1) {
    scale.emplace(options.scaler->tensors(options.devices[0]).first);
  }
  call.mark = mark_of(call.ref, scale ? scale->get() : 1, false);
}

void Pipeline::State::meet(Call& call) {
  PeerVerdict own;
  own.rank = options.peers->rank();
  own.rows = call.rows;
  own.may_split = may_split();
  own.ties = tied.size();
  own.links = options.peers->wants_links() ? random_link_name() : 0;
  own.microbatches = call.microbatches();
  try {
    if (call.refused) {
      std::rethrow_exception(call.refused);
    }
    if (!agreed_.made) {
      tied.make_room();
    }
    const auto first = first_microbatches(call.trains, call.rows);
    own.setup =
        number_of(to_csv(schedule(first, call.trains)) + std::to_string(options.max_retries) + "/" +
                  c10::DeviceTypeName(options.devices[0].type()) + "/" +
                  std::to_string(replicas->world_size()) + "/" + std::to_string(agreed_.progress));
  } catch (...) {
    call.refused = std::current_exception();
    own.kind = Status::error;
    own.text = failure_outside(call.refused).text;
  }
  PeerVerdict all;
  try {
    all = agree(own);
    if (all.kind == Status::ok && all.ties > 0 && !agreed_.made) {
      tied.meet();
      tied.drop_room();
    }
  } catch (...) {  // on all ranks: the group broke, or their weights do not belong together
    call.refused = call.refused ? call.refused : std::current_exception();
    call.runs = false;
    return;
  }
  agreed_.may_split = all.may_split;
  agreed_.any_tied = all.ties > 0;
  if (all.microbatches != call.microbatches()) {  // another rank has less memory
    call.retry.set_plan(ExecutionPlan::in_pieces(call.rows, all.microbatches));
  }
  agreed_.made = all.kind == Status::ok;
  read_meeting(call, all);
  if (call.runs && all.links > 0) {
    connect(call, all.links);
  }
}

void Pipeline::State::connect(Call& call, int64_t name) {
  PeerVerdict own;
  own.rank = options.peers->rank();
  try {
    options.peers->connect(name, rank_of_stage(schedule(call.microbatches(), call.trains)));
  } catch (...) {
    call.refused = std::current_exception();
    own.kind = Status::error;
    own.text = failure_outside(call.refused).text;
  }
  auto all = own;
  if (options.peers->is_on_device()) {  // else what fails here is the group, which all will see
    try {
      all = agree(own);
    } catch (...) {
      call.refused = call.refused ? call.refused : std::current_exception();
      all.kind = Status::error;
    }
  }
  if (all.kind != Status::ok) {
    options.peers->drop_links();
  }
  read_meeting(call, all);
}

void Pipeline::State::read_meeting(Call& call, const PeerVerdict& all) {
  call.runs = all.kind == Status::ok;
  if (call.runs || call.refused) {
    return;
  }
  call.failed_elsewhere = all.rank >= 0;
  if (!call.failed_elsewhere) {
    call.refused = std::make_exception_ptr(c10::ValueError({"step", "attempt.cpp", 0}, all.text));
  }
}

// In the first step by an exchange, later the total of the last one; where they differ, gradients are scaled in the end.
void Pipeline::State::find_ref(Call& call) {
  const auto rows = static_cast<double>(std::max<int64_t>(call.rows, 1));
  call.ref = rows;
  if (call.group.world_size() == 1) {
    return;
  }
  call.ref = last_total_ > 0 ? last_total_ : 1;
  if (last_total_ > 0) {
    return;
  }
  ControlRecord record;
  if (!call.refused && !call.failed_elsewhere) {
    record.next_weight = rows;
  }
  try {
    const double total = next_total_weight(call.group.exchange(record));
    call.ref = std::isfinite(total) && total > 0 ? total : 1;
  } catch (...) {
    call.refused = call.refused ? call.refused : std::current_exception();
  }
}

StepResult Pipeline::State::run_actions(const Call& call, std::exception_ptr refused) {
  StepWork actions;
  actions.refused = std::move(refused);
  if (call.work.begin && !actions.refused) {
    try {
      call.work.begin({call.split.begin(), call.split.begin() + call.filled()});
    } catch (...) {
      actions.refused = std::current_exception();
    }
  }
  std::vector<int64_t> begins{0};
  for (const auto rows : call.split) {
    begins.push_back(begins.back() + rows);
  }
  actions.filled = static_cast<int>(call.filled());
  actions.rows = call.rows;
  actions.rungs = recomputing->all();
  actions.hidden_state = options.hidden_state;
  actions.ref = call.ref;
  actions.thread_scope = call.work.thread_scope;
  actions.input = [&](int i) { return call.work.input(i, begins[i], begins[i + 1]); };
  if (call.trains) {
    actions.loss = [&](int i, const Value& output) {
      return call.work.loss(i, begins[i], begins[i + 1], output);
    };
  }
  if (call.work.keywords) {
    actions.keywords = [&](int i) { return call.work.keywords(i, begins[i], begins[i + 1]); };
  }
  if (options.scaler != nullptr && options.scaler->enabled()) {
    actions.seed = [&](const at::Tensor& share) { return options.scaler->scale(share); };
  }
  if (!replicas->empty() && call.trains) {
    actions.before_backward = [&](const Action& action) { replicas->before(action); };
    actions.after_backward = [&](const Action& action) { replicas->after(action); };
  }
  return executor->run(call.order, actions);
}

StepResult Pipeline::State::run(Call& call) {
  auto refused = call.refused;
  const auto trying = [&](const auto& work) {
    try {
      work();
      return true;
    } catch (...) {
      refused = refused ? refused : std::current_exception();
      return false;
    }
  };
  doing = call.trains ? "a step: its actions" : "inference: its actions";
  trying([&] { call.group.begin_attempt(0); });
  const bool has_order = trying([&] {
    call.order = schedule(call.microbatches(), call.trains);
    if (call.runs && options.peers) {
      options.peers->require_links(rank_of_stage(call.order));
    }
    replicas->begin(call.order);
  });
  StepResult result;
  if (call.runs && has_order) {  // refused or not: the other ranks wait for messages
    const NormsScope scope(norms, call.trains ? call.filled() : 0);
    noting(result, [&] {
      result = run_actions(call, refused);
      if (result.interrupted) {
        result.failure = failure_outside(result.interrupted);
      }
      if (call.trains && !result.failure && !result.peer_failed) {
        for (const auto& each : norms) {
          each->norms.finish();
        }
        tied.make_room();
      }
    });
  } else if (refused) {
    result.failure = failure_outside(refused);
  } else {
    result.peer_failed = true;
  }
  return result;
}

PeerVerdict Pipeline::State::own_verdict(const Call& call, const StepResult& result) const {
  PeerVerdict own;
  own.rank = options.peers ? options.peers->rank() : 0;
  own.replica = call.group.rank();
  own.rows = call.rows;
  own.may_split = agreed_.may_split;
  own.has_more = !result.caller_gradients.empty();
  if (!result.failure) {
    own.kind = result.peer_failed     ? Status::peer_failed
               : result.drew_together ? Status::retry
                                      : Status::ok;
    return own;
  }
  const auto& failure = *result.failure;
  const bool again = call.retry.may_repeat() && !call.refused;
  if ((call.group.late_gradient() && again) || Recomputing::is_refused(result)) {
    own.kind = Status::retry;
  } else if (failure.kind == Status::out_of_memory) {
    const bool as_it_was = again && call.as_it_was;
    own.refine = again && !as_it_was && call.microbatches() < call.rows && agreed_.may_split &&
                 !options.fixed_schedule;
    const bool repeated = as_it_was || own.refine || recomputing->may_help(call, result);
    own.kind = repeated ? Status::retry : Status::out_of_memory;
  } else {
    own.kind = Status::error;
  }
  own.rank = failure.rank;
  own.text = failure.text;
  if (failure.index >= 0) {
    own.text += " (in the " + pipeline::to_string(failure) + ")";
  }
  return own;
}

void Pipeline::State::read_replicas(Call& call, StepResult& result,
                                    const std::vector<ControlRecord>& records,
                                    PeerVerdict& verdict) const {
  if (verdict.kind == Status::ok) {
    noting(result, [&] { require_same_mark(records, name_of(call)); });
    verdict = own_verdict(call, result);
  }
  if (const auto divergence = call.group.divergence();
      verdict.kind == Status::ok && !divergence.empty()) {
    result.failure = failure_outside(std::make_exception_ptr(PlanMismatch(divergence)));
    verdict = own_verdict(call, result);
  }
  for (int replica = 0; replica < std::ssize(records); ++replica) {
    const auto& record = records[replica];
    verdict.weight += record.weight;
    verdict.loss_sum += record.loss_sum;
    verdict.stop = std::max(verdict.stop, record.stop);
    verdict.regroup = verdict.regroup || record.regroup;
    if (replica != call.group.rank() && record.verdict >= Status::retry &&
        record.verdict > verdict.kind) {
      verdict.kind = record.verdict;
      verdict.replica = replica;
      verdict.text = verdict.kind == Status::retry ? "" : failure_text(call.group, replica);
    }
  }
}

PeerVerdict Pipeline::State::close(Call& call, StepResult& result) {
  const memory::Unlimited unlimited;
  doing = "the actions are over: the ranks agree how they ended";
  call.as_it_was = result.failure && result.failure->kind == Status::out_of_memory &&
                   call.retry.may_do_as_it_was(result.failure->text, device_of(*result.failure));
  ControlRecord record;
  record.verdict = Status::ok;
  record.ref = call.mark;
  if (own_verdict(call, result).kind == Status::ok) {
    noting(result, [&] {
      if (options.peers && !replicas->empty()) {  // the last buckets take what this says of all
        options.peers->await_messages();
      }
      const auto loss_sum = weigh(result.losses, record);
      call.group.complete({record, loss_sum});
    });
  }
  auto own = own_verdict(call, result);
  if (own.kind != Status::ok) {
    noting(result, [&] {
      if (is_failure(own.kind)) {
        call.group.publish_failure(own.kind, own.text);
      }
      record.loss_sum = 0;
      call.group.drain(record, std::max(own.kind, Status::retry));
    });
  }
  std::vector<ControlRecord> records;
  noting(result, [&] { records = call.group.finish(); });
  own = own_verdict(call, result);
  read_replicas(call, result, records, own);
  own.broken = replicas->is_broken();
  return call.trains ? with_weight(agree(own), name_of(call), call.rows) : agree(own);
}

PeerVerdict Pipeline::State::agree(const PeerVerdict& own) {
  try {
    auto all = options.peers ? options.peers->agree(own) : own;
    agreed_.broken = agreed_.broken || all.broken;
    return all;
  } catch (...) {
    agreed_.broken = true;
    throw;
  }
}

}  // namespace brimful::pipeline
