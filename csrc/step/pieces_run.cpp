// How pieces run, and what a rank still owes the others when one of them fails.
#include "step/pieces_run.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <string_view>

#include "memory/oom_observer.h"
#include "step/behind_error.h"
#include "step/each_parameter.h"
#include "step/engine_queue.h"
#include "step/failure_board.h"
#include "step/inner_collectives.h"

namespace brimful {
namespace {
std::optional<c10::Device> device_of(const StepGroup& group) {
  if (!group.outside().empty()) {
    return group.outside().back().device();
  }
  const auto& participants = group.participants();
  for (auto each = participants.rbegin(); each != participants.rend(); ++each) {
    if (const auto& parameters = (*each)->parameters(); !parameters.empty()) {
      return parameters.back().device();
    }
  }
  return std::nullopt;
}

/// Since then, without what the prologue has waited for others.
float work_ms(std::chrono::steady_clock::time_point started, const Prologue* prologue) {
  auto worked = std::chrono::steady_clock::now() - started;
  worked -= prologue != nullptr ? prologue->waited() : decltype(worked)::zero();
  return std::chrono::duration<float, std::milli>(worked).count();
}

/// Its weight is a number, or a 0-dim float64 tensor where the loss is, if `may_be_late`.
PieceLoss with_usable_weight(PieceLoss piece, bool may_be_late) {
  const auto& late = piece.late_weight;
  if (!late.defined() || !may_be_late || late.is_cpu() || late.device() != piece.loss.device()) {
    return with_known_weight(std::move(piece));
  }
  piece.late_weight = late.detach().reshape({}).to(at::kDouble);
  return piece;
}

bool takes_late_weights(const StepGroup& group) {
  const auto& all = group.participants();
  return std::all_of(all.begin(), all.end(), [](const auto& participant) {
    return participant->attempt().takes_late_weight();
  });
}

bool counts(const PieceLoss& piece) {
  return piece.weight > 0 || piece.late_weight.defined();
}

void require_no_backward(const StepGroup& group) {
  for_each_parameter(group.participants(), group.outside(), [](const at::Tensor& parameter) {
    TORCH_CHECK_VALUE(
        !parameter.grad().defined(),
        "the loss function ran backward itself, and its gradients would count twice (a "
        "parameter has one, shape: ",
        parameter.sizes(), "); only return the loss: the step runs backward");
  });
}

/// What gloo, NCCL and c10d say of a collective that another rank has left.
bool is_of_a_group(std::string_view error) {
  constexpr std::array<std::string_view, 5> kTexts{"gloo/", "pair closure", "NCCL", "ProcessGroup",
                                                   "process group"};
  return std::any_of(kTexts.begin(), kTexts.end(),
                     [&](const auto text) { return error.find(text) != std::string_view::npos; });
}

bool gradients_complete(const StepGroup& group) {
  const auto& all = group.participants();
  return !all.empty() && std::all_of(all.begin(), all.end(), [](const auto& participant) {
    return participant->attempt().progress().complete;
  });
}

void begin_forward(const StepGroup& group) {
  for (const auto& participant : group.participants()) {
    participant->attempt().begin_forward();
  }
}

/// `backward`: of a loss, with the seed that it begins with.
template <typename Backward>
void run_backward(const StepGroup& group, const PieceLoss& piece, const Divisor& ref, bool last,
                  const Backward& backward) {
  for (const auto& participant : group.participants()) {
    participant->attempt().begin_piece(last, piece.loss);
  }
  const auto seed = seed_of(piece, ref);
  run_backward_cleanly(device_of(group).value_or(piece.loss.device()),
                       [&] { backward(piece.loss, seed); });
}
}  // namespace

AttemptResult PiecesRun::run() {
  const EvidenceScope evidence(device_of(group_));
  const memory::RetryScope retries;
  group_.begin_attempt(attempt_.buffer_source);
  auto& record = said_.record;
  record.ref = fingerprint(attempt_.ref.value);
  try {
    const auto started = std::chrono::steady_clock::now();
    if (attempt_.prologue != nullptr && !attempt_.prologue->run()) {
      group_.complete(said_);
    } else {
      const bool may_be_late = takes_late_weights(group_);
      int64_t begin = 0;
      for (size_t i = 0; i < attempt_.split.size(); ++i) {
        begin_forward(group_);
        const auto piece = task_.forward(begin, begin + attempt_.split[i]);
        begin += attempt_.split[i];
        run_piece(piece, may_be_late, i == 0, i + 1 == attempt_.split.size());
      }
      record.work_ms = work_ms(started, attempt_.prologue);
      record.ref = task_.mark();
      complete();
    }
  } catch (...) {
    result_.error = std::current_exception();
  }
  if (result_.error) {
    is_out_of_memory(
        result_.error);  // read at once: operators fail while an error of Python is set
  }
  // Behind the handler: the exception no longer pins the frames in which memory ran out.
  for (const auto& participant : group_.participants()) {
    result_.buckets_launched += participant->attempt().progress().launched;
  }
  if (result_.error) {
    end_after_error();
  } else {
    result_.records = group_.finish(/*late=*/true);
  }
  return std::move(result_);
}

void PiecesRun::run_piece(const PieceLoss& given, bool may_be_late, bool first, bool last) {
  require_loss(given);
  const auto piece = with_usable_weight(given, may_be_late);
  require_loss(piece);  // a weight that is known now
  if (first) {
    require_no_backward(group_);
  }
  if (counts(piece)) {
    sums_.add(piece);
  }
  if (counts(piece) || attempt_.lockstep) {
    run_backward(group_, piece, attempt_.ref, last,
                 [&](const auto& loss, const auto& seed) { task_.backward(loss, seed); });
  }
}

void PiecesRun::complete() {
  task_.finish_buffers();
  said_ = sums_.said_with(said_.record);
  result_.doubtful = sums_.doubtful();
  group_.complete(said_);
}

void PiecesRun::end_after_error() {
  note_error();
  const bool ran_out = result_.own == Status::out_of_memory;
  if (ran_out && group_.outside().empty() && gradients_complete(group_) && complete_behind()) {
    result_.records = group_.finish();
    return;
  }
  const bool together = attempt_.lockstep && group_.world_size() > 1;
  if (together && inner_collectives(group_) != InnerCollectives::known) {
    leave_lockstep();
    return;
  }
  of_a_group_ = together && is_of_a_group(result_.text);
  if (of_a_group_) {
    cause_ = cause_elsewhere();  // before others fail because of this one
  }
  if (together) {  // the others wait in the model's collectives, and not for what is decided here
    behind_error([&] {
      for (const auto& participant : group_.participants()) {
        participant->attempt().launch_early(Fill::anything);
      }
    });
  }
  result_.same_split = result_.own == Status::out_of_memory && task_.may_do_as_it_was(result_.text);
  const bool can_retry =
      attempt_.retries_left &&
      (result_.own == Status::retry ||
       (result_.own == Status::out_of_memory && (attempt_.can_shrink || result_.same_split)));
  const bool met =
      attempt_.prologue != nullptr && attempt_.prologue->has_met() && group_.world_size() > 1;
  if (can_retry && result_.own == Status::out_of_memory && result_.buckets_launched == 0 && !met &&
      !together) {
    result_.retry_alone = true;
    return;
  }
  const auto verdict = can_retry                              ? Status::retry
                       : result_.own == Status::out_of_memory ? Status::out_of_memory
                                                              : Status::error;
  end_failed(verdict);
}

void PiecesRun::note_error() {
  result_.text = to_string(result_.error);
  const bool again = group_.late_gradient() || task_.starts_over();
  const bool ran_out =
      is_out_of_memory(result_.error) || (!again && task_.is_too_fine(result_.text));
  result_.own = again ? Status::retry : ran_out ? Status::out_of_memory : Status::error;
  if (result_.own != Status::error) {
    result_.error = nullptr;
  }
}

bool PiecesRun::complete_behind() {
  try {
    complete();
    result_.own = Status::ok;
  } catch (...) {  // a sparse gradient could not be made ready, or a hook failed: drain instead
    result_.error = std::current_exception();
  }
  if (result_.own == Status::ok) {
    return true;
  }
  result_.text = to_string(result_.error);
  if (is_out_of_memory(result_.error)) {
    result_.error = nullptr;
  } else {
    result_.own = Status::error;
  }
  return false;
}

void PiecesRun::end_failed(Status verdict) {
  if (is_failure(verdict)) {
    group_.publish_failure(verdict, result_.text);
  }
  const auto leave = [&] {
    if (attempt_.prologue != nullptr) {
      attempt_.prologue->leave(verdict);
    }
    auto record = attempt_.record;
    if (attempt_.lockstep && verdict == Status::retry) {
      record.next_pieces = static_cast<uint16_t>(
          std::min<int64_t>(task_.pieces_again(result_.same_split), UINT16_MAX));
    }
    group_.drain(record, verdict);
  };
  if (!result_.error) {
    leave();
    result_.records = group_.finish();
    return;
  }
  const bool drained = behind_error(leave);
  if (!drained) {  // the others wait for what this rank cannot send
    group_.abandon(Status::error, result_.text);
  }
  if (!drained || !behind_error([&] { result_.records = group_.finish(); })) {
    if (of_a_group_) {
      throw_broken();
    }
    std::rethrow_exception(result_.error);
  }
}

void PiecesRun::leave_lockstep() {
  cause_ = cause_elsewhere();
  group_.abandon(result_.own == Status::out_of_memory ? Status::out_of_memory : Status::error,
                 result_.text);
  if (cause_) {
    throw_cause();
  }
  if (result_.own == Status::error && inner_collectives(group_) != InnerCollectives::none &&
      is_of_a_group(result_.text)) {
    throw_broken();
  }
}

std::optional<Failure> PiecesRun::cause_elsewhere() const {
  return group_.participants()[0]->board().find_other(group_.step(), group_.rank(),
                                                      group_.world_size());
}

void PiecesRun::throw_cause() const {
  detail::throw_rank_failed(cause_->rank, group_.step() - 1, cause_->kind,
                            "rank " + std::to_string(cause_->rank) +
                                " failed between collectives of the model: " + to_string(*cause_) +
                                " (here: " + result_.text + ")");
}

void PiecesRun::throw_broken() const {
  if (cause_) {
    throw_cause();
  }
  detail::throw_rank_failed(
      -1, group_.step(), Status::error,
      "the collectives of the model broke (rank " + std::to_string(group_.rank()) +
          "): a rank died, or left its loop; look at the others' output, and start the job again. "
          "The error here was: " +
          result_.text);
}

void rehearse(StepGroup& group, int64_t rows, const PieceWork& work,
              const std::function<void()>& between) {
  for (const auto& participant : group.participants()) {
    participant->attempt().begin(0);
  }
  try {
    PieceSums sums;
    for (const bool second : {false, true}) {
      begin_forward(group);
      auto piece = work.forward(0, rows);
      require_loss(piece);
      if (piece.late_weight.defined()) {  // what it is makes no difference to memory
        piece.weight = static_cast<double>(rows);
        piece.late_weight.reset();
      }
      if (!second) {
        require_no_backward(group);
      }
      if (piece.weight > 0) {
        sums.add(piece);  // for its memory alone
        run_backward(group, piece, {}, false, work.backward);
      }
      if (!second) {
        between();
      }
    }
  } catch (...) {
    is_out_of_memory(std::current_exception());  // read at once, as in a step
    group.discard();
    throw;
  }
  group.discard();
}

}  // namespace brimful
