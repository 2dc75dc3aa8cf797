// A step of a sizer as its engine asks for it: pieces, one after the other, attempt by attempt.
#include <brimful/memory/stats.h>
#include <brimful/sizer/rule_vote.h>
#include <brimful/step/pieces.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <iterator>

#include "base/thrown_by.h"
#include "memory/host_tensor.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/climb.h"
#include "sizer/learn_collectives.h"
#include "sizer/loss_scale.h"
#include "sizer/pair_run.h"
#include "step/agreement.h"
#include "step/kept_gradients.h"
#include "step/no_capture.h"

namespace brimful {

/// A step under way, attempt by attempt.
class BatchSizer::State::SizerStep final : public StepTask, public AttemptTask {
 public:
  SizerStep(State& sizer, const StepInput& input, const PieceWork& work, PairRun* pairs)
      : s_(sizer),
        entered_(enter(sizer)),
        input_(input),
        work_(work),
        pairs_(pairs),
        backward_(pairs != nullptr ? work.backward  // it has scaled the loss itself
                                   : scaled_backward(work.backward, sizer.options_.scaler)),
        climb_(sizer.ladder_.ladder, input, work,
               [&sizer, &input] {
                 return sizer.splitting_.policy_of(input).room(sizer.options_.device);
               }),
        clock_(sizer.options_.device) {}

  bool accumulates() const override { return input_.accumulate; }
  bool meets() const override { return pairs_ != nullptr; }
  std::optional<int64_t> limit_bytes() const override { return s_.checked_.limit; }
  uint16_t next_pieces() const override { return s_.record_for(Next::unknown, input_).next_pieces; }

  void prepare() override {
    s_.check_input(input_);
    s_.capture(input_, work_);
    if (s_.checked_.limit && s_.options_.optimizer_bytes) {
      s_.require_room_for_optimizer(input_);
    }
  }

  ControlRecord first_record() const override {
    auto record = s_.record_for(input_.rows ? Next::yes : Next::no, input_);
    if (input_.vote) {
      input_.vote->put(record);
    }
    return record;
  }

  void note_said(const std::vector<ControlRecord>& said) override {
    s_.rule_.pending = s_.rule_.pending && pairs_ == nullptr && !is_voted(said);
    said_ = said;
  }

  void begin() override {
    if (input_.vote) {
      s_.settle_rule(*input_.vote, said_);
    }
    s_.require_agreed_pieces(input_);
  }

  Outcome run() override {
    s_.splitting_.policy_of(input_).measure();
    announce();
    s_.engine_.owe();  // the others wait in their step
    learn_collectives(s_.engine_, input_, work_, s_.options_.scaler);
    plan_ = s_.choose_pieces(input_, pairs_ == nullptr ? &work_ : nullptr, outcome_);
    auto first = s_.splitting_.first_plan(input_, outcome_.pieces, Splitting::given(input_, plan_));
    first.rungs = climb_.first(is_finest(first.pieces));
    auto& retry = retry_.emplace(s_.splitting_.policy_of(input_), Splitting::units_of(input_),
                                 s_.options_.max_retries, std::move(first), &s_.engine_.recorder());
    for (bool stands = false; !stands;) {
      retry.begin_attempt();
      const memory::PeakScope peak(s_.options_.device);
      begin_attempt(retry);
      AttemptResult result;
      {
        const auto as_before = c10::make_scope_exit([&] { s_.norms_.after_step(); });
        result = PiecesRun(s_.engine_.group(), attempt_, *this).run();
      }
      stands = retry.end_attempt(settle(result, retry, peak));
    }
    outcome_.retries = retry.retries();
    outcome_.peaks = {{s_.options_.device, outcome_.peak_bytes}};
    s_.note_peak(input_, outcome_);
    s_.log_rungs(outcome_, retry.attempts().back(), climb_);
    outcome_.attempts = retry.take_attempts();
    return std::move(outcome_);
  }

  PieceLoss forward(int64_t begin, int64_t end) override {
    clock_.begin_piece(begin, end);
    const auto on_rungs = climb_.forward();
    const auto begun = s_.norms_.begin_piece(next_piece_, std::ssize(attempt_.split));
    auto piece = work_.forward(begin, end);
    s_.norms_.end_piece(next_piece_++, std::ssize(attempt_.split), begun);
    s_.own_weights_ = s_.own_weights_ || piece.late_weight.defined() ||
                      piece.weight != static_cast<double>(end - begin);
    return piece;
  }

  void backward(const at::Tensor& loss, const at::Tensor& seed) override {
    backward_(loss, seed);
    clock_.end_piece();
  }

  void finish_buffers() override { s_.norms_.finish(); }
  bool starts_over() override { return climb_.is_rejected(); }

  int64_t pieces_again(bool as_it_was) override {
    return as_it_was ? retry_->plan().pieces : retry_->next(s_.options_.device).pieces;
  }

  uint32_t mark() override {
    const double scale = scale_ ? *scale_->get().const_data_ptr<float>() : 1;
    return mark_of(attempt_.ref.mark, scale, input_.accumulate);
  }

  bool may_do_as_it_was(const std::string& shortage) override {
    if (pairs_ != nullptr &&
        pairs_->in_loss()) {  // once more: something else may have had the room
      attempt_.can_shrink = false;
      return !std::exchange(loss_ran_out_, true) || retry_->garbage_helps(s_.options_.device);
    }
    return retry_->may_do_as_it_was(shortage, s_.options_.device);
  }

  /// A piece of one row, which only the sizer chose, has failed by an error of torch's normalisations that two rows have not.
  bool is_too_fine(const std::string& error) override {
    const auto& split = attempt_.split;
    const bool is =
        retry_->retries() > 0 && s_.splitting_.least_rows() == 1 && !s_.splitting_.in_lockstep() &&
        !input_.split && !input_.by_length && input_.rows.value_or(0) > 1 &&
        std::find(split.begin(), split.end(), 1) != split.end() &&
        error.find("Expected more than 1 value per channel when training") != std::string::npos;
    s_.splitting_.set_least_rows(is ? 2 : s_.splitting_.least_rows());
    attempt_.can_shrink = attempt_.can_shrink || is;
    return is;
  }

 private:
  bool is_finest(int64_t pieces) const {
    return s_.splitting_.is_finest(input_, pieces) || !s_.norms_.may_split();
  }

  void announce() {
    const auto& agreed = s_.engine_.agreed();
    attempt_.lockstep = s_.splitting_.in_lockstep();
    attempt_.buffer_source = agreed.buffer_source;
    // A loss over pairs is divided by nothing but its own rows.
    attempt_.ref = pairs_ == nullptr ? s_.engine_.ref() : Divisor{agreed.ref(), {}, agreed.ref()};
    auto* const scaler = s_.options_.scaler;
    if (scaler != nullptr && scaler->enabled() && s_.engine_.group().world_size() > 1) {
      scale_.emplace(scaler->tensors(s_.options_.device).first);
    }
    attempt_.prologue = pairs_;
    attempt_.record = agreed.next;
    attempt_.record.verdict = input_.rows ? Status::ok : Status::no_data;
  }

  void begin_attempt(const Retry& retry) {
    outcome_.split = attempt_.split =
        s_.splitting_.split_by(retry.plan(), input_, Splitting::given(input_, plan_));
    const bool finest = is_finest(std::ssize(attempt_.split));
    climb_.begin_attempt(retry.plan().rungs, finest, s_.options_.max_retries > 0);
    if (attempt_.lockstep &&
        retry.retries() > 0) {  // what was announced was not known to fail then
      attempt_.record.next_pieces = std::max(attempt_.record.next_pieces, next_pieces());
    }
    attempt_.retries_left = retry.may_repeat() || climb_.may_start_over();
    attempt_.can_shrink = !finest || climb_.may_go_on();
    s_.engine_.attempt_begins();
    next_piece_ = 0;
    clock_.begin_attempt();
    if (pairs_ != nullptr) {
      pairs_->begin_attempt(attempt_.split);
    }
  }

  void note_times() {
    auto& known = s_.splitting_.by_length();
    if (std::exchange(known.warm, true)) {
      clock_.end_attempt(known.times, input_.by_length->lengths, outcome_.split);
    }
  }

  Ended settle(const AttemptResult& result, Retry& retry, const memory::PeakScope& peak) {
    climb_.end_attempt(result.own == Status::ok);
    if (result.own == Status::ok && input_.by_length && !input_.by_length->packed &&
        outcome_.rungs.empty()) {
      note_times();
    }
    const auto attempt_peak = peak.peak_bytes();
    outcome_.rungs = climb_.named();
    auto ended = s_.settle_attempt(
        result, input_,
        retry.note(note_of(result, attempt_peak), result.own == Status::out_of_memory), retry,
        pairs_);
    if (ended.how == Ended::How::stands) {
      s_.stand(result, attempt_.ref, pairs_ != nullptr, outcome_);
      s_.engine_.group().kept().add();
      outcome_.total_ms = s_.engine_.recorder().attempt_ms();
      outcome_.order = input_.by_length ? input_.by_length->order : outcome_.order;
    } else {
      if (ended.how == Ended::How::ran_out) {
        retry.set_plan(
            Splitting::plan_as_run(input_, outcome_.split, retry.plan().rungs));  // some are uneven
      }
      s_.engine_.undo();
      retry.remedy();
      if (attempt_.lockstep) {
        ended = std::move(ended).in_pieces(wanted_pieces(result.records));
      }
      ended = climb_.follow(std::move(ended), retry.plan());
      s_.log_shortage(ended, outcome_, input_, retry);
      if (plan_ && result.own == Status::out_of_memory) {
        s_.forecaster_.note_shortfall(input_.kind);
      }
    }
    outcome_.peak_bytes = std::max(outcome_.peak_bytes, peak.peak_bytes());
    return ended;
  }

  AttemptNote note_of(const AttemptResult& result, int64_t peak_bytes) const {
    AttemptNote note;
    note.pieces = std::ssize(outcome_.split);
    note.piece_rows = largest_piece(outcome_.split);
    note.peak_bytes = peak_bytes;
    note.rungs = outcome_.rungs;
    note.buckets_launched = result.buckets_launched;
    note.alone = result.retry_alone;
    return note;
  }

  static OneCall::Entered enter(State& sizer) {
    require_no_capture(sizer.options_.device, "a step");
    return sizer.engine_.enter("step");
  }

  State& s_;
  OneCall::Entered entered_;
  const StepInput& input_;
  const PieceWork& work_;
  PairRun* pairs_;
  decltype(PieceWork::backward) backward_;
  Climb climb_;
  Outcome outcome_;
  PiecesAttempt attempt_;
  std::optional<memory::ValuesOnHost> scale_;
  std::optional<Plan> plan_;
  std::optional<Retry> retry_;
  bool loss_ran_out_ = false;
  int64_t next_piece_ = 0;
  PieceClock clock_;
  std::vector<ControlRecord> said_;
};

/// A step of the loop that is under way, if any: the others are informed of what follows it, and it counts if it fails too.
class BatchSizer::StepOfLoop {
 public:
  explicit StepOfLoop(BatchSizer& sizer) : loop_(sizer.loop_), engine_(sizer.state_->engine()) {
    if (loop_ != nullptr) {
      loop_->announce();
      loop_->is_announced_ = false;
    }
  }
  ~StepOfLoop() {
    if (loop_ != nullptr) {
      ++loop_->steps_;
      loop_->at_end_ = engine_.agreed().at_end;
    }
  }
  StepOfLoop(const StepOfLoop&) = delete;
  StepOfLoop& operator=(const StepOfLoop&) = delete;

 private:
  detail::SizerLoop* loop_;
  StepEngine& engine_;
};

Outcome BatchSizer::step(const StepInput& input, const PieceWork& work) {
  const StepOfLoop of_loop(*this);
  State::SizerStep step(*state_, input, work, nullptr);
  return state_->engine().step(step);
}

Outcome BatchSizer::step_pairs(const StepInput& input, const PairWork& work) {
  const StepOfLoop of_loop(*this);
  auto& s = *state_;
  PairRun pairs(work, {s.engine_.group(), s.engine_.before().transaction(),
                       s.engine_.before().batch(), s.options_.device, s.options_.scaler,
                       /*checks=*/!s.pairs_.checked});
  auto checked = input;
  checked.accumulate = work.options.accumulate;
  if (s.splitting_.in_lockstep() && !checked.error) {
    checked.error = thrown_by([] {
      TORCH_CHECK_VALUE(
          false,
          "a step over pairs cannot run a model that has collectives of its own (lockstep: true); "
          "take its SyncBatchNorm out, or train it with step");
    });
  }
  const auto pieces = pairs.pieces();
  State::SizerStep step(s, checked, pieces, &pairs);
  auto outcome = s.engine_.step(step);
  outcome.losses = pairs.losses();
  s.pairs_.checked = s.pairs_.checked || !outcome.losses.empty();
  return outcome;
}

}  // namespace brimful
