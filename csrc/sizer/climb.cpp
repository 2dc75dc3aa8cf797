#include "sizer/climb.h"

#include <brimful/step/oom.h>

#include <utility>
#include <vector>

namespace brimful {
namespace {
constexpr int64_t kMostClimbs = 8;  // in one step, beside the retries that split

ladder::Ladder::Kind name_of(const RowKind& kind) {
  auto name = kind.form;
  for (const auto size : kind.sizes) {
    name += "," + std::to_string(size);
  }
  return name;
}

}  // namespace

Climb::Climb(std::optional<ladder::Ladder>& ladder, const StepInput& input, const PieceWork& work,
             AskRoom room)
    : ladder_(ladder), input_(input), work_(work), room_(std::move(room)) {}

const ladder::Ladder::Kind& Climb::kind() const {
  if (!kind_) {
    try {
      kind_ = input_.ask_kind ? name_of(input_.ask_kind()) : std::string();
    } catch (...) {  // a split that copies: not one row fits, and the pieces will say so
      if (!is_out_of_memory(std::current_exception())) {
        throw;
      }
      kind_ = std::string();
    }
  }
  return *kind_;
}

Rungs Climb::first(bool finest) {
  if (!ladder_ || !input_.rows) {
    return {};
  }
  if (input_.rungs) {
    return {ladder_->numbers_of(input_.rungs->recomputed),
            ladder_->numbers_of(input_.rungs->offloaded), input_.rungs->everything};
  }
  return finest && ladder_->knows_any() ? ladder_->first(kind(), room_()) : Rungs{};
}

void Climb::begin_attempt(const Rungs& rungs, bool finest, bool may_repeat) {
  rungs_ = rungs;
  finest_ = finest;
  may_repeat_ = may_repeat;
  rejected_.clear();
}

bool Climb::may_start_over() const {
  return ladder_ && may_repeat_ && finest_ && !ended_ && climbed_ < kMostClimbs;
}

bool Climb::may_go_on() const {
  return may_start_over() && !rungs_.everything;
}

Climb::Forward::Forward(ladder::Ladder::Attempt* attempt) : attempt_(attempt) {
  if (attempt_ != nullptr) {
    attempt_->begin_forward();
  }
}

Climb::Forward::~Forward() {
  if (attempt_ != nullptr) {
    attempt_->end_forward();
  }
}

// Within the attempt's work: what fails here fails the step as an error of a forward does.
Climb::Forward Climb::forward() {
  if (!rungs_.empty() && !attempt_) {
    std::vector<at::Tensor> batch;
    if (work_.tensors && input_.rows) {
      for (auto& named : work_.tensors(0, *input_.rows)) {
        batch.push_back(std::move(named.second));
      }
    }
    attempt_ = std::make_unique<ladder::Ladder::Attempt>(*ladder_, kind(), rungs_, batch);
  }
  return Forward(attempt_.get());
}

bool Climb::is_rejected() const {
  return attempt_ && (!ladder_->modules().rejected().empty() ||
                      (may_start_over() && !attempt_->refused().empty()));
}

void Climb::end_attempt(bool ok) {
  if (attempt_ && ok) {
    attempt_->complete();
  }
  rejected_ = attempt_ ? ladder_->modules().rejected() : std::string();
  if (is_rejected() && rejected_.empty()) {
    rejected_ = "nothing is offloaded from here on, the host has no pinned memory for it (" +
                attempt_->refused() + ")";
    ladder_->leave_out_offload();
  }
  if (auto more = attempt_ ? ladder_->modules().recomputed() : std::vector<int32_t>();
      more.size() > rungs_.recomputed.size()) {
    rungs_.recomputed = std::move(more);
  }
  attempt_.reset();
}

Ended Climb::follow(Ended ended, const ExecutionPlan& failed) {
  const bool ran_out = ended.how == Ended::How::ran_out;
  if (!ladder_ || !finest_ || (!ran_out && rejected_.empty())) {
    return ended;
  }
  ++climbed_;
  auto next = rejected_.empty()      ? ladder_->next(kind(), rungs_, room_())
              : !ladder_->offloads() ? ladder_->next(kind(), {}, room_())
                                     : std::optional(ladder_->first(kind(), room_()));
  ended_ = !next;
  ended.next = failed;
  ended.next->rungs = next || rejected_.empty() ? next.value_or(rungs_) : Rungs{};
  ended.next_text =
      (rejected_.empty() ? std::string("memory ran out, and a piece cannot be smaller")
                         : rejected_) +
      "; the step is repeated with " + to_string(named(ended.next->rungs));
  if (!ran_out) {
    ended.how = Ended::How::as_it_was;
  }
  return ended;
}

StepRungs Climb::named(const Rungs& rungs) const {
  if (!ladder_) {
    return {};
  }
  return {ladder_->names_of(rungs.recomputed), ladder_->names_of(rungs.offloaded),
          rungs.everything};
}

StepRungs Climb::named() const {
  return rungs_.empty() ? StepRungs{} : named(rungs_);
}

std::optional<ladder::PlanCost> Climb::cost() const {
  return ladder_ && !rungs_.empty() ? ladder_->cost_of(kind(), rungs_) : std::nullopt;
}

}  // namespace brimful
