#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/late_sums.h>
#include <brimful/step/step.h>
#include <brimful/step/stop.h>

#include <algorithm>
#include <utility>

#include "step/attempts.h"
#include "step/behind_error.h"
#include "step/failure_board.h"
#include "step/kept_gradients.h"
#include "step/meet.h"
#include "step/sums_of.h"

namespace brimful {
namespace {
StepAttempts attempts_of(const std::vector<std::shared_ptr<Participant>>& participants) {
  std::vector<ParticipantAttempt*> in_order;
  in_order.reserve(participants.size());
  for (const auto& participant : participants) {
    in_order.push_back(&participant->attempt());
  }
  return StepAttempts(std::move(in_order));
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

void StepGroup::begin_attempt(int buffer_source) {
  for (const auto& participant : participants_) {
    participant->attempt().begin(buffer_source);
  }
  // Anew for every attempt: a module may also be in another group, or in a plain loop in between.
  attempts_of(participants_).set_order();
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

void StepGroup::abandon(FailureKind kind, const std::string& text) {
  publish_failure(kind, text);
  for (const auto& participant : participants_) {
    behind_error([&] { participant->attempt().abandon(); });
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

std::vector<ControlRecord> StepGroup::finish(bool late) {
  divergence_.clear();
  late_sums_.reset();
  auto ending = participants_.empty() ? end_alone() : attempts_of(participants_).finish();
  own_ = {};
  divergence_ = std::move(ending.divergence);
  late_sums_ = std::move(ending.sums);
  return late ? std::move(ending.records) : with_losses(std::move(ending.records));
}

std::vector<ControlRecord> StepGroup::with_losses(std::vector<ControlRecord> records) const {
  if (!late_sums_) {
    return records;
  }
  const auto& losses = late_sums_->losses();
  for (size_t rank = 0; rank < records.size(); ++rank) {
    records[rank].loss_sum = losses.at(rank);
  }
  return records;
}

Ending StepGroup::end_alone() {
  Ending ending{{own_.record}, {}, {}};
  if (own_.loss_sum.defined() && !own_.loss_sum.is_cpu()) {
    ending.sums = sums_of(own_);
  } else if (own_.loss_sum.defined()) {
    ending.records[0].loss_sum = own_.loss_sum.item<double>();
  }
  return ending;
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

}  // namespace brimful
