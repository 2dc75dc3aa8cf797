// One attempt of a step: the actions, then the reducers' verdict over the replicas, then that of the pipeline's ranks.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>

#include "base/thrown_by.h"
#include "pipeline/failure.h"
#include "pipeline/pipeline_step.h"
#include "step/agreement.h"
#include "step/failures.h"

namespace brimful::pipeline {
namespace {
/// Losses times weights; on another device than the CPU as a tensor, so that nothing waits.
at::Tensor weigh(const std::vector<PieceLoss>& losses, ControlRecord& record) {
  const memory::Unlimited unlimited;
  at::Tensor sum;
  for (const auto& [loss, weight, late_weight] : losses) {
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

/// What the stages' threads call. All outlive it.
StepWork actions_of(const Call& call, const PipelineOptions& options, Replicas& replicas) {
  StepWork actions;
  std::vector<int64_t> begins{0};
  for (const auto rows : call.split) {
    begins.push_back(begins.back() + rows);
  }
  actions.filled = static_cast<int>(call.filled());
  actions.rows = call.rows;
  actions.hidden_state = options.hidden_state;
  actions.ref = call.ref;
  actions.thread_scope = call.work.thread_scope;
  actions.input = [&call, begins](int i) { return call.work.input(i, begins[i], begins[i + 1]); };
  if (call.trains) {
    actions.loss = [&call, begins](int i, const Value& output) {
      return with_known_weight(call.work.loss(i, begins[i], begins[i + 1], output));
    };
  }
  if (call.work.keywords) {
    actions.keywords = [&call, begins](int i) {
      return call.work.keywords(i, begins[i], begins[i + 1]);
    };
  }
  if (options.scaler != nullptr && options.scaler->enabled()) {
    actions.seed = [&options](const at::Tensor& share) { return options.scaler->scale(share); };
  }
  if (!replicas.empty() && call.trains) {
    actions.before_backward = [&replicas](const Action& action) { replicas.before(action); };
    actions.after_backward = [&replicas](const Action& action) { replicas.after(action); };
  }
  return actions;
}
}  // namespace

void Pipeline::State::PipelineStep::meet() {
  p_.agreement.meet(
      call_, p_.may_split(),
      [&] {
        const auto first = p_.first_microbatches(call_.trains, call_.rows);
        return to_csv(p_.schedule(first, call_.trains)) + std::to_string(p_.options.max_retries) +
               "/" + c10::DeviceTypeName(p_.options.devices[0].type()) + "/" +
               std::to_string(p_.replicas->world_size());
      },
      [&] { return rank_of_stage(p_.schedule(call_.microbatches(), call_.trains)); });
}

StepResult Pipeline::State::PipelineStep::run_schedule() {
  auto refused = call_.refused;
  const auto trying = [&](const auto& work) {
    const auto failed = thrown_by(work);
    refused = refused ? refused : failed;
    return !failed;
  };
  p_.doing = call_.trains ? "a step: its actions" : "inference: its actions";
  trying([&] { call_.group.begin_attempt(call_.trains ? p_.engine->agreed().buffer_source : 0); });
  const bool has_order = trying([&] {
    call_.order = p_.schedule(call_.microbatches(), call_.trains);
    if (call_.runs && p_.options.peers) {
      p_.options.peers->require_links(rank_of_stage(call_.order));
    }
    p_.replicas->begin(call_.order);
  });
  StepResult result;
  if (call_.runs && has_order) {  // refused or not: the other ranks wait for messages
    const NormsScope scope(p_.norms, call_.trains ? call_.filled() : 0);
    noting(result, [&] {
      auto actions = actions_of(call_, p_.options, *p_.replicas);
      actions.rungs = p_.recomputing->all();
      actions.refused = refused;
      if (call_.work.begin && !refused) {
        actions.refused = thrown_by([&] {
          call_.work.begin({call_.split.begin(), call_.split.begin() + call_.filled()});
        });
      }
      result = p_.executor->run(call_.order, actions);
      if (result.interrupted) {
        result.failure = p_.agreement.failure_outside(result.interrupted);
      }
      if (call_.trains && !result.failure && !result.peer_failed) {
        for (const auto& each : p_.norms) {
          if (call_.rows > 0) {
            each->norms.finish();
          }
        }
        p_.tied.make_room();
      }
    });
  } else if (refused) {
    result.failure = p_.agreement.failure_outside(refused);
  } else {
    result.peer_failed = true;
  }
  return result;
}

PeerVerdict Pipeline::State::PipelineStep::own_verdict(const StepResult& result) const {
  PeerVerdict own;
  own.rank = p_.options.peers ? p_.options.peers->rank() : 0;
  own.replica = call_.group.rank();
  own.rows = call_.rows;
  own.may_split = p_.agreement.may_split();
  own.has_more = !result.caller_gradients.empty();
  if (!result.failure) {
    own.kind = result.peer_failed     ? Status::peer_failed
               : result.drew_together ? Status::retry
                                      : Status::ok;
    return own;
  }
  const auto& failure = *result.failure;
  const bool again = call_.retry.may_repeat() && !call_.refused;
  if ((call_.group.late_gradient() && again) || Recomputing::is_refused(result)) {
    own.kind = Status::retry;
  } else if (failure.kind == Status::out_of_memory) {
    const bool as_it_was = again && call_.as_it_was;
    own.refine = again && !as_it_was && call_.microbatches() < call_.rows &&
                 p_.agreement.may_split() && !p_.options.fixed_schedule;
    const bool repeated = as_it_was || own.refine || p_.recomputing->may_help(call_, result);
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

void Pipeline::State::PipelineStep::read_replicas(StepResult& result, PeerVerdict& verdict) const {
  if (verdict.kind == Status::ok) {
    noting(result, [&] { require_same_mark(records_, name()); });
    verdict = own_verdict(result);
  }
  if (const auto divergence = call_.group.divergence();
      verdict.kind == Status::ok && !divergence.empty()) {
    result.failure =
        p_.agreement.failure_outside(std::make_exception_ptr(PlanMismatch(divergence)));
    verdict = own_verdict(result);
  }
  for (int replica = 0; replica < std::ssize(records_); ++replica) {
    const auto& record = records_[replica];
    verdict.weight += record.weight;
    verdict.loss_sum += record.loss_sum;
    verdict.stop = std::max(verdict.stop, record.stop);
    verdict.regroup = verdict.regroup || record.regroup;
    if (replica != call_.group.rank() && record.verdict >= Status::retry &&
        record.verdict > verdict.kind) {
      verdict.kind = record.verdict;
      verdict.replica = replica;
      verdict.text = verdict.kind == Status::retry ? "" : failure_text(call_.group, replica);
    }
  }
}

PeerVerdict Pipeline::State::PipelineStep::close(StepResult& result) {
  const memory::Unlimited unlimited;
  p_.doing = "the actions are over: the ranks agree how they ended";
  call_.as_it_was = result.failure && result.failure->kind == Status::out_of_memory &&
                    call_.retry.may_do_as_it_was(result.failure->text, device_of(*result.failure));
  auto record = p_.engine->agreed().next;
  record.verdict = call_.work.no_data ? Status::no_data : Status::ok;
  record.ref = call_.mark;
  if (own_verdict(result).kind == Status::ok) {
    noting(result, [&] {
      if (p_.options.peers &&
          !p_.replicas->empty()) {  // the last buckets take what this says of all
        p_.options.peers->await_messages();
      }
      const auto loss_sum = weigh(result.losses, record);
      call_.group.complete({record, loss_sum});
    });
  }
  auto own = own_verdict(result);
  if (own.kind != Status::ok) {
    noting(result, [&] {
      if (is_failure(own.kind)) {
        call_.group.publish_failure(own.kind, own.text);
      }
      record.loss_sum = 0;
      call_.group.drain(record, std::max(own.kind, Status::retry));
    });
  }
  records_.clear();
  noting(result, [&] { records_ = call_.group.finish(/*late=*/!p_.options.peers); });
  own = own_verdict(result);
  read_replicas(result, own);
  own.broken = p_.replicas->is_broken();
  const auto all = p_.agreement.agree(own);
  return call_.trains ? with_weight(all, name(), call_.rows) : all;
}

}  // namespace brimful::pipeline
