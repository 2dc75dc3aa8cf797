// A step of all ranks, from its check to its end: agreed on, undone, failed together.
#include "step/step_engine.h"

#include <brimful/step/oom.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "base/thrown_by.h"
#include "step/behind_error.h"
#include "step/kept_gradients.h"

namespace brimful {

StepEngine::StepEngine(StepGroup group, Transaction transaction, bool local, const char* of)
    : group_(std::move(group)),
      before_(std::move(transaction)),
      local_(local),
      calls_under_way_(of) {
  require_all_reduced();
}

void StepEngine::set_group(StepGroup group) {
  group_ = std::move(group);
}

void StepEngine::require_all_reduced() const {
  TORCH_CHECK_VALUE(
      local_ || group_.world_size() == 1 || group_.outside().empty(),
      "some parameters are in no reducer, and their gradients would stay on this rank "
      "(ranks: ",
      group_.world_size(),
      "); wrap their module in DistributedDataParallel, or set local where each rank "
      "trains them by itself");
}

void StepEngine::regrouped() {
  group_.require_one_group();
  require_all_reduced();
  agreed_ = {};  // a rank that has joined knows nothing of it
}

void StepEngine::follow_group() {
  if (brimful::follow_group(group_)) {
    require_all_reduced();
    const auto announced = agreed_.next;  // of this rank alone
    agreed_ = {};
    agreed_.next = announced;
  }
}

bool StepEngine::begin_loop(const std::function<ControlRecord()>& record) {
  follow_group();
  agreed_.next = record();
  agreed_.at_end = false;
  const auto records = group_.exchange(agreed_.next);
  adopt(records);
  note_end(records);
  return !agreed_.at_end;
}

void StepEngine::announce_failure(FailureKind kind, const std::string& text) {
  if (!agreed_.holds) {
    group_.exchange({});  // the others begin their step with one
  }
  agreed_.holds = false;
  group_.run_failed(kind, text, {}, meets_);
  group_.discard();
}

void StepEngine::undo() {
  owe();
  group_.discard();
  before_.restore();
}

void StepEngine::note_end(const std::vector<ControlRecord>& records) {
  agreed_.at_end = !records.empty() && no_rank_steps(records);
}

void StepEngine::adopt(const std::vector<ControlRecord>& records) {
  agreed_.total = next_total_weight(records);
  agreed_.buffer_source = next_buffer_source(records);
  agreed_.pieces = wanted_pieces(records);
  agreed_.holds = true;
}

void StepEngine::note_total(double total) {
  agreed_.last_total = total;
  late_totals_.forget_last();
}

void StepEngine::resume(int64_t steps, double last_total) {
  steps_ = steps;
  note_total(last_total);
}

Outcome StepEngine::step(StepTask& task) {
  ++calls_;
  follow_group();
  meets_ = task.meets();
  const auto gradients_back = c10::make_scope_exit([&] { group_.kept().give_back(); });
  const auto lets_go = c10::make_scope_exit([&] { before_.release(); });
  auto failed = thrown_by([&] {
    if (task.accumulates()) {
      group_.keep_gradients();  // first: a step that fails may empty the buckets
    }
    late_totals_.check();
    task.prepare();
  });
  failed = agree(task, failed);
  if (agreed_.next.next == Next::unknown) {
    agreed_.next.next_pieces = task.next_pieces();  // as if the next batch were like this one
  }
  if (failed) {
    fail_together(task, failed);
  }
  agreed_.owed = false;
  std::optional<Outcome> outcome;
  failed = thrown_by([&] { outcome = task.run(); });
  if (failed) {
    fail(task, failed);
  }
  recorder_.end_step(true, task.limit_bytes());
  agreed_.next = {};
  ++steps_;
  return std::move(*outcome);
}

/// Returns what is wrong with this rank's part; the others wait in their step, so that it fails there.
std::exception_ptr StepEngine::agree(StepTask& task, std::exception_ptr failed) {
  failed = failed && task.carries(failed) ? nullptr : failed;
  if (!agreed_.holds) {
    const auto broke = thrown_by([&] {
      const auto said = group_.exchange(failed ? ControlRecord{} : task.first_record());
      task.note_said(said);
      adopt(said);
    });
    if (broke && !task.carries(broke)) {
      std::rethrow_exception(broke);
    }
  }
  if (!failed) {
    failed = thrown_by([&] { task.begin(); });
  }
  agreed_.holds = false;
  return failed && task.carries(failed) ? nullptr : failed;
}

void StepEngine::fail_together(StepTask& task, const std::exception_ptr& failed) {
  const auto failure = failure_of(failed);
  note_end(group_.run_failed(failure.kind, failure.text, agreed_.next, task.meets()));
  agreed_.next = {};
  std::rethrow_exception(failed);
}

void StepEngine::fail(StepTask& task, const std::exception_ptr& failed) {
  recorder_.end_step(false, task.limit_bytes());
  behind_error([&] {
    if (std::exchange(agreed_.owed, false)) {
      const auto failure = failure_of(failed);
      group_.run_failed(failure.kind, failure.text, agreed_.next, task.meets());
    }
  });
  agreed_.next = {};
  behind_error([&] { group_.discard(); });
  behind_error([&] { before_.restore_model(); });
  std::rethrow_exception(failed);
}

}  // namespace brimful
