#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/oom.h>
#include <brimful/step/step.h>
#include <brimful/step/stop.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "memory/oom_observer.h"
#include "step/attempts.h"
#include "step/behind_error.h"
#include "step/each_parameter.h"
#include "step/engine_queue.h"
#include "step/failure_board.h"
#include "step/kept_gradients.h"
#include "step/meet.h"

namespace brimful {
namespace {
std::optional<c10::Device> device_of(const std::vector<std::shared_ptr<Participant>>& participants,
                                     const std::vector<at::Tensor>& outside) {
  if (!outside.empty()) {
    return outside.back().device();
  }
  for (auto each = participants.rbegin(); each != participants.rend(); ++each) {
    if (const auto& parameters = (*each)->parameters(); !parameters.empty()) {
      return parameters.back().device();
    }
  }
  return std::nullopt;
}

/// Where a piece's backward runs.
c10::Device device_of(const StepGroup& group, const PieceLoss& piece) {
  return device_of(group.participants(), group.outside()).value_or(piece.loss.device());
}

/// Since then, without what the prologue has waited for others.
float work_ms(std::chrono::steady_clock::time_point started, const Prologue* prologue) {
  auto worked = std::chrono::steady_clock::now() - started;
  worked -= prologue != nullptr ? prologue->waited() : decltype(worked)::zero();
  return std::chrono::duration<float, std::milli>(worked).count();
}

StepAttempts attempts_of(const std::vector<std::shared_ptr<Participant>>& participants) {
  std::vector<ParticipantAttempt*> in_order;
  in_order.reserve(participants.size());
  for (const auto& participant : participants) {
    in_order.push_back(&participant->attempt());
  }
  return StepAttempts(std::move(in_order));
}

/// A piece's, by its weight, beside those before it.
at::Tensor with_loss(const at::Tensor& loss_sum, const PieceLoss& piece) {
  const auto weighted = piece.loss.detach().reshape({}).to(at::kDouble) * piece.weight;
  return loss_sum.defined() ? loss_sum + weighted : weighted;
}
}  // namespace

StepGroup::StepGroup(std::vector<std::shared_ptr<Participant>> participants,
                     std::vector<at::Tensor> outside)
    : participants_(std::move(participants)),
      outside_(distinct_tensors(std::move(outside))),
      kept_(std::make_shared<KeptGradients>()) {
  require_one_group();
}

void StepGroup::require_one_group() const {
  for (const auto& participant : participants_) {
    TORCH_CHECK_VALUE(
        participant->rank() == rank() && participant->world_size() == world_size(),
        "modules of one step must share rank and world size (rank: ", participant->rank(), " of ",
        participant->world_size(), ", first module's: ", rank(), " of ", world_size(),
        "); wrap them with the same process group");
  }
}

// Anew for every attempt: a module may also be in another group, or in a plain loop in between.
void StepGroup::set_order() {
  attempts_of(participants_).set_order();
}

int StepGroup::rank() const {
  return participants_.empty() ? 0 : participants_[0]->rank();
}

int StepGroup::world_size() const {
  return participants_.empty() ? 1 : participants_[0]->world_size();
}

int64_t StepGroup::step() const {
  return participants_.empty() ? 0 : participants_[0]->step();
}

std::vector<ControlRecord> StepGroup::exchange(const ControlRecord& record) {
  return participants_.empty() ? std::vector<ControlRecord>{record}
                               : participants_[0]->exchange(record);
}

void StepGroup::keep_gradients() {
  kept_->take(parameters_of(*this));
}

at::Tensor StepGroup::begin_backward(const PieceLoss& piece, double ref, bool last) {
  for (const auto& participant : participants_) {
    participant->attempt().begin_piece(last, piece.loss);
  }
  return at::full_like(piece.loss, piece.weight / ref, at::TensorOptions().requires_grad(false));
}

void StepGroup::rehearse(int64_t rows, const PieceWork& work,
                         const std::function<void()>& between) {
  for (const auto& participant : participants_) {
    participant->attempt().begin(0);
  }
  try {
    at::Tensor loss_sum;
    for (const bool second : {false, true}) {
      const auto piece = work.forward(0, rows);
      require_loss(piece);
      if (!second) {
        require_no_backward();
      }
      if (piece.weight > 0) {
        loss_sum = with_loss(loss_sum, piece);  // for its memory alone
        const auto seed = begin_backward(piece, 1, false);
        run_backward_cleanly(device_of(*this, piece), [&] { work.backward(piece.loss, seed); });
      }
      if (!second) {
        between();
      }
    }
  } catch (...) {
    is_out_of_memory(std::current_exception());  // read at once, as in run()
    discard();
    throw;
  }
  discard();
}

void StepGroup::begin_attempt(int buffer_source) {
  for (const auto& participant : participants_) {
    participant->attempt().begin(buffer_source);
  }
  set_order();
}

bool StepGroup::late_gradient() const {
  return std::any_of(participants_.begin(), participants_.end(), [](const auto& participant) {
    return participant->attempt().progress().late;
  });
}

void StepGroup::launch(Fill fill, const Announcement& said) {
  own_ = said;
  own_.record.stop = stop_to_send();
  own_.record.regroup = regroup_requested();
  attempts_of(participants_).launch(fill, own_);
}

void StepGroup::complete(const Announcement& said) {
  launch(Fill::gradients, said);
}

void StepGroup::drain(ControlRecord record, Status verdict) {
  record.verdict = verdict;
  record.weight = 0;
  launch(Fill::anything, {record, {}});
}

AttemptResult StepGroup::run(const Attempt& attempt, AttemptTask& task) {
  AttemptResult result;
  const EvidenceScope evidence(device_of(participants_, outside_));
  const memory::RetryScope retries;
  begin_attempt(attempt.buffer_source);
  Announcement said{attempt.record, {}};
  auto& record = said.record;
  record.ref = fingerprint(attempt.ref);
  try {
    const auto started = std::chrono::steady_clock::now();
    if (attempt.prologue != nullptr && !attempt.prologue->run()) {
      complete(said);
    } else {
      int64_t begin = 0;
      for (size_t i = 0; i < attempt.split.size(); ++i) {
        const bool last = i + 1 == attempt.split.size();
        const auto piece = task.forward(begin, begin + attempt.split[i]);
        begin += attempt.split[i];
        require_loss(piece);
        if (i == 0) {
          require_no_backward();
        }
        if (piece.weight > 0) {
          said.loss_sum = with_loss(said.loss_sum, piece);
          record.weight += piece.weight;
        }
        if (piece.weight > 0 || attempt.lockstep) {
          const auto seed = begin_backward(piece, attempt.ref, last);
          run_backward_cleanly(device_of(*this, piece), [&] { task.backward(piece.loss, seed); });
        }
      }
      record.work_ms = work_ms(started, attempt.prologue);
      record.ref = task.mark();
      task.finish_buffers();
      complete(said);
    }
  } catch (...) {
    result.error = std::current_exception();
  }
  if (result.error) {
    is_out_of_memory(result.error);  // read at once: operators fail while an error of Python is set
  }
  // Behind the handler: the exception no longer pins the frames in which memory ran out.
  result.buckets_launched = launched();
  if (result.error) {
    end_after_error(attempt, task, said, result);
  } else {
    result.records = finish();
  }
  return result;
}

void StepGroup::end_after_error(const Attempt& attempt, AttemptTask& task, const Announcement& said,
                                AttemptResult& result) {
  note_error(task, result);
  const bool ran_out = result.own == Status::out_of_memory;
  if (ran_out && outside_.empty() && gradients_complete() && complete_behind(task, said, result)) {
    result.records = finish();
    return;
  }
  if (attempt.lockstep && world_size() > 1) {
    leave_lockstep(result);
    return;
  }
  result.same_split = result.own == Status::out_of_memory && task.may_do_as_it_was(result.text);
  const bool can_retry =
      attempt.retries_left &&
      (result.own == Status::retry ||
       (result.own == Status::out_of_memory && (attempt.can_shrink || result.same_split)));
  const bool met = attempt.prologue != nullptr && attempt.prologue->has_met() && world_size() > 1;
  if (can_retry && result.own == Status::out_of_memory && result.buckets_launched == 0 && !met) {
    result.retry_alone = true;
    return;
  }
  const auto verdict = can_retry                             ? Status::retry
                       : result.own == Status::out_of_memory ? Status::out_of_memory
                                                             : Status::error;
  end_failed(attempt, verdict, result);
}

void StepGroup::note_error(AttemptTask& task, AttemptResult& result) const {
  result.text = to_string(result.error);
  const bool again = late_gradient() || task.starts_over();
  const bool ran_out = is_out_of_memory(result.error) || (!again && task.is_too_fine(result.text));
  result.own = again ? Status::retry : ran_out ? Status::out_of_memory : Status::error;
  if (result.own != Status::error) {
    result.error = nullptr;
  }
}

bool StepGroup::complete_behind(AttemptTask& task, const Announcement& said,
                                AttemptResult& result) {
  try {
    task.finish_buffers();
    complete(said);
    result.own = Status::ok;
  } catch (...) {  // a sparse gradient could not be made ready, or a hook failed: drain instead
    result.error = std::current_exception();
  }
  if (result.own == Status::ok) {
    return true;
  }
  result.text = to_string(result.error);
  if (is_out_of_memory(result.error)) {
    result.error = nullptr;
  } else {
    result.own = Status::error;
  }
  return false;
}

void StepGroup::end_failed(const Attempt& attempt, Status verdict, AttemptResult& result) {
  if (is_failure(verdict)) {
    publish_failure(verdict, result.text);
  }
  const auto leave = [&] {
    if (attempt.prologue != nullptr) {
      attempt.prologue->leave(verdict);
    }
    drain(attempt.record, verdict);
  };
  if (!result.error) {
    leave();
    result.records = finish();
    return;
  }
  const bool drained = behind_error(leave);
  if (!drained) {  // the others wait for what this rank cannot send
    abandon(Status::error, result.text);
  }
  if (!drained || !behind_error([&] { result.records = finish(); })) {
    std::rethrow_exception(result.error);
  }
}

void StepGroup::abandon(FailureKind kind, const std::string& text) {
  publish_failure(kind, text);
  for (const auto& participant : participants_) {
    behind_error([&] { participant->attempt().abandon(); });
  }
}

void StepGroup::leave_lockstep(const AttemptResult& result) {
  const auto peer = participants_[0]->board().find_other(step(), rank(), world_size());
  abandon(result.own == Status::out_of_memory ? Status::out_of_memory : Status::error, result.text);
  if (peer) {
    detail::throw_rank_failed(peer->rank, step() - 1, peer->kind,
                              "rank " + std::to_string(peer->rank) +
                                  " failed between collectives of the model: " + to_string(*peer) +
                                  " (here: " + result.text + ")");
  }
}

std::vector<ControlRecord> StepGroup::run_failed(FailureKind kind, const std::string& text,
                                                 const ControlRecord& record, bool meets) {
  publish_failure(kind, text);
  begin_attempt(0);
  if (meets) {
    ControlRecord failed;
    failed.verdict = kind;
    meet_ranks(*this, failed);
  }
  drain(record, kind);
  return finish();
}

std::vector<ControlRecord> StepGroup::finish() {
  if (participants_.empty()) {
    if (const auto loss_sum = std::exchange(own_.loss_sum, {}); loss_sum.defined()) {
      own_.record.loss_sum = loss_sum.item<double>();
    }
    return {own_.record};
  }
  own_ = {};
  divergence_.clear();
  auto ending = attempts_of(participants_).finish();
  divergence_ = std::move(ending.divergence);
  return std::move(ending.records);
}

void StepGroup::accept(double scale, bool keep_unused) {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  for (const auto& participant : participants_) {
    participant->attempt().accept(scale, keep_unused);
  }
  for (const auto& parameter : outside_) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined() && !keep_unused) {
      gradient = at::zeros_like(parameter);
    } else if (gradient.defined() && scale != 1) {
      gradient.mul_(scale);
    }
  }
}

void StepGroup::discard() {
  for (const auto& participant : participants_) {
    participant->attempt().discard();
  }
  for (const auto& parameter : outside_) {
    parameter.mutable_grad().reset();
  }
}

int64_t StepGroup::launched() const {
  int64_t sum = 0;
  for (const auto& participant : participants_) {
    sum += participant->attempt().progress().launched;
  }
  return sum;
}

bool StepGroup::gradients_complete() const {
  return !participants_.empty() &&
         std::all_of(participants_.begin(), participants_.end(),
                     [](const auto& p) { return p->attempt().progress().complete; });
}

}  // namespace brimful
