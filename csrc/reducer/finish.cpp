// The end of a step: one wait, the verdict of all ranks, and gradients that are kept or thrown away.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <stdexcept>
#include <utility>

#include "reducer/engine.h"
#include "reducer/gather.h"
#include "reducer/rows.h"

namespace brimful {

void EngineStep::end_attempt() {
  const auto lock = attempt_.lock();
  launcher_.end();
  attempt_.end();
  outgoing_.loss_sum.reset();
  outgoing_.late_weight.reset();
  link_.count(&Reducer::Counters::steps);
}

void EngineStep::leave_backward() {
  const auto lock = attempt_.lock();
  attempt_.leave();
  launcher_.set_order(nullptr, nullptr);
  gate_.share_error();
}

void EngineStep::abandon() {
  link_.give_up(std::make_exception_ptr(std::runtime_error(
                    "this rank left a step whose collectives it could not match")),
                attempt_.step());
  launcher_.wait_for_all();
  end_attempt();
}

void EngineStep::end_unmade() {
  end_attempt();
  attempt_.take_back();
  link_.count(&Reducer::Counters::steps, -1);
  discard();
}

void EngineStep::give_up() {
  gate_.step().end();
  launcher_.wait_for_all();
  if (link_.is_broken()) {
    end_attempt();
    link_.require_whole(attempt_.step() - 1, "a step");
  }
  end_unmade();
}

Ending EngineStep::finish() {
  transport_->wait();
  if (gate_.step().has_ended() && !link_.is_broken()) {
    end_unmade();
    gate_.step().throw_ended([&] { driver_->throw_step_ended(gate_.step()); });
  }
  end_attempt();
  link_.require_whole(attempt_.step() - 1, "a step");
  const auto& records = transport_->read();
  if (looks_at_updates() && worst(records) < Status::retry) {
    updates_->settle(records,
                     [&](const ControlRecord& own) { return exchange_records(engine_, own); });
  }
  auto divergence = looks_at_updates() ? updates_->divergence() : std::string();
  auto sums = divergence.empty() ? transport_->take_sums() : nullptr;
  return {records, std::move(divergence), std::move(sums)};
}

void EngineStep::accept(double scale, bool keep_unused) {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  transport_->end_sums();
  exchange_rows(link_, layout_, attempt_.step() - 1);
  // First: if anything fails here, the plan stands.
  tuner_.note_agreed(transport_->records()[0].plan);
  // In a plain loop the next step has the same scale.
  placement_.take_sums(scale, attempt_.is_of_loop() ? 1.0 : scale, keep_unused);
  if (looks_at_updates()) {
    updates_->note_gradients();
  }
  placement_.forget();
  write_back_buffers();
  tuner_.propose(watch_, attempt_.step());
}

/// Where the rank whose buffers win had no data, which only a plain loop allows, each rank keeps its own.
void EngineStep::write_back_buffers() {
  const auto& winner = transport_->records()[attempt_.buffer_source()];
  if (!attempt_.is_of_loop() || winner.verdict != Status::no_data) {
    layout_.tail->write_back_buffers();
  }
  if (layout_.tail->has_new_sizes()) {
    tuner_.repeat();
  }
}

void EngineStep::discard() {
  transport_->drop_sums();
  placement_.discard();
}

void EngineStep::accept_nothing() {
  transport_->end_sums();
  // The others wait for this rank, which has none.
  exchange_rows(link_, layout_, attempt_.step() - 1);
  discard();
  write_back_buffers();
  tuner_.note_agreed(transport_->records()[0].plan);
  tuner_.propose(watch_, attempt_.step());
}

}  // namespace brimful
