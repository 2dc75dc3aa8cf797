// What a user may call, but for a step (sizer_step.cpp); batch_sizer_state.h has what is behind it.
#include <brimful/error.h>
#include <brimful/log.h>

#include <utility>

#include "sizer/batch_sizer_state.h"

namespace brimful {

namespace {
StepGroup on_one_device(StepGroup group) {
  group.require_one_device();
  return group;
}
}  // namespace

BatchSizer::BatchSizer(StepGroup group, Transaction transaction, BatchSizerOptions options)
    : state_(std::make_unique<State>(on_one_device(std::move(group)), std::move(transaction),
                                     std::move(options))) {}
BatchSizer::~BatchSizer() = default;
BatchSizer::BatchSizer(BatchSizer&&) noexcept = default;

std::optional<Plan> BatchSizer::plan(const StepInput& input, const PieceWork& work) {
  return state_->plan(input, work);
}
bool BatchSizer::predicts() const {
  return state_->forecaster().predicts();
}
bool BatchSizer::begin_loop(Next next, const StepInput& first) {
  return state_->begin_loop(next, first);
}
void BatchSizer::announce_next(Next next, const StepInput& next_input) {
  state_->announce_next(next, next_input);
}
void BatchSizer::announce_failure(FailureKind kind, const std::string& text) {
  state_->engine().announce_failure(kind, text);
}
Report BatchSizer::report() const {
  return state_->report();
}
std::map<std::string, double> BatchSizer::state() const {
  return state_->state();
}
void BatchSizer::load_state(const std::map<std::string, double>& state) {
  state_->load_state(state);
}
bool BatchSizer::expects_step() const {
  return state_->engine().agreed().holds && !at_end();
}
bool BatchSizer::at_end() const {  // of the loop around one that has ended: not yet
  return loop_ != nullptr ? loop_->at_end_ : state_->engine().agreed().at_end;
}
int64_t BatchSizer::steps() const {
  return state_->engine().steps();
}
int64_t BatchSizer::calls() const {
  return state_->engine().calls();
}
Transaction& BatchSizer::transaction() {
  return state_->engine().before().transaction();
}
void BatchSizer::regrouped() {
  state_->regrouped();
}
int BatchSizer::world_size() const {
  return state_->engine().group().world_size();
}

void BatchSizer::report_failure(FailureKind kind, const std::string& text) {
  if (at_end() || world_size() == 1) {
    return;
  }
  try {
    announce_failure(kind, text);
  } catch (...) {
    log(LogLevel::warning,
        "could not announce this rank's failure: " + to_string(std::current_exception()));
  }
}

void BatchSizer::fail_optimizer(const std::string& text) {
  const auto half = "the optimizer failed in the middle of its step (" + text + ")";
  // No shortage to the others: no rank can go on without a checkpoint.
  report_failure(Status::error, half);
  throw HalfStepError(half + "; parameters may be half updated: load a checkpoint");
}

void BatchSizer::optimizer_step(const std::function<void()>& step) {
  try {
    step();
  } catch (const RankFailed&) {
    throw;
  } catch (const HalfStepError&) {
    throw;
  } catch (...) {
    fail_optimizer(to_string(std::current_exception()));
  }
}

bool detail::SizerLoop::begin(Next next, const StepInput& first) {
  leave();
  const bool any = sizer_.begin_loop(next, first);
  outer_ = sizer_.loop_;
  if (outer_ != nullptr) {
    outer_->is_announced_ = false;
  }
  sizer_.loop_ = any ? this : outer_;
  return any;
}

void detail::SizerLoop::begin_body(Next next, StepInput following) {
  next_ = next;
  following_ = std::move(following);
  is_announced_ = false;
  steps_ = 0;
  announce();
}

void detail::SizerLoop::announce() {
  if (!is_announced_) {
    sizer_.announce_next(next_, following_);
    is_announced_ = true;
  }
}

void detail::SizerLoop::leave() {
  for (auto** loop = &sizer_.loop_; *loop != nullptr; loop = &(*loop)->outer_) {
    if (*loop == this) {
      *loop = outer_;
      return;
    }
  }
}

}  // namespace brimful
