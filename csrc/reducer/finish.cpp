// The end of a step: one wait, the verdict of all ranks, and gradients that are kept or thrown away.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "reducer/engine.h"

namespace brimful {

void Engine::wait_for_buckets() {
  s_.watch.begin_wait();
  if (!s_.link.broken) {
    s_.link.waiting_since = std::chrono::steady_clock::now();
  }
  for (size_t i = 0; i < s_.layout.buckets.size(); ++i) {
    auto& bucket = s_.layout.buckets[i];
    if (bucket.work && !s_.link.broken) {
      s_.link.call([&] { s_.link.wait_for(*bucket.work, bucket.device, bucket.launched_at); });
    } else if (bucket.hooked && !s_.link.broken) {
      s_.link.wait_for(*bucket.hooked);
    }
    s_.watch.waited(static_cast<int64_t>(i));
    bucket.work.reset();
    bucket.hooked.reset();
    bucket.launched = false;
  }
  s_.watch.end_wait();
  s_.hooks.forget_last();
  ++s_.counters.host_waits;
}

void Engine::end_attempt() {
  const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
  s_.attempt.next = 0;
  s_.attempt.mode = Mode::idle;
  s_.attempt.launching = false;
  s_.attempt.completing = false;
  s_.turns.reset();
  s_.attempt.outgoing.loss_sum.reset();
  s_.attempt.before = nullptr;
  s_.attempt.after = nullptr;
  ++s_.attempt.step;
  ++s_.counters.steps;
}

void Engine::abandon() {
  s_.link.give_up(std::make_exception_ptr(std::runtime_error(
                      "this rank left a step whose collectives it could not match")),
                  s_.attempt.step);
  wait_for_buckets();
  end_attempt();
}

void Engine::end_unmade() {
  end_attempt();
  --s_.attempt.step;
  --s_.counters.steps;
  discard();
}

void Engine::give_up() {
  s_.turns.ended = true;
  wait_for_buckets();
  if (s_.link.broken) {
    end_attempt();
    s_.link.throw_broken(s_.attempt.step - 1, "a step", to_string(s_.link.broken));
  }
  end_unmade();
}

/// All reducers of the step have stopped where this one has. Throws.
void Engine::end_turn() {
  auto* next = dynamic_cast<Engine*>(s_.attempt.after);
  end_unmade();
  while (next != nullptr) {
    auto* const following = dynamic_cast<Engine*>(next->s_.attempt.after);
    next->wait_for_buckets();
    next->end_unmade();
    next = following;
  }
  driver_->throw_turn_ended();
}

Ending Engine::finish() {
  wait_for_buckets();
  if (s_.turns.ended && !s_.link.broken) {
    end_turn();
  }
  end_attempt();
  if (s_.link.broken) {
    s_.link.throw_broken(s_.attempt.step - 1, "a step", to_string(s_.link.broken));
  }
  s_.layout.tail->read();
  std::vector<float> ms_by_rank;
  for (const auto& record : s_.layout.tail->records()) {
    ms_by_rank.push_back(record.work_ms);
  }
  s_.watch.end_step(s_.attempt.step - 1, ms_by_rank, s_.turns.agreeing_ms());
  const auto records = s_.layout.tail->records();
  if (s_.updates && !s_.attempt.uneven && worst(records) < Status::retry) {
    s_.updates->settle(records,
                       [&](const ControlRecord& own) { return exchange_records(*this, own); });
  }
  return {records, s_.updates && !s_.attempt.uneven ? s_.updates->divergence() : std::string()};
}

void Engine::accept(double scale, bool keep_unused) {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  exchange_rows();
  s_.tuner.note_agreed(
      s_.layout,
      s_.layout.tail->records()[0].plan);  // first: if anything fails here, the plan stands
  const double carry =
      s_.attempt.plain ? 1.0 : scale;  // in a plain loop the next step has the same scale
  for (auto& bucket : s_.layout.buckets) {
    if (bucket.sparse()) {
      continue;
    }
    const auto row = s_.layout.row_of(bucket);
    if (bucket.wire) {
      bucket.wire->decode(row, scale, carry);
      continue;
    }
    if (bucket.hook_result.defined() && !bucket.hook_result.is_alias_of(row)) {
      row.copy_(bucket.hook_result.reshape({-1}));
    }
    const double factor = bucket.hook_result.defined() ? scale * s_.attempt.scales.hook : scale;
    if (factor != 1) {
      row.mul_(factor);
    }
  }
  for (size_t i = 0; i < s_.layout.parameters.size(); ++i) {
    const auto& slot = s_.layout.slots[i];
    const auto& bucket = s_.layout.buckets[slot.bucket];
    if (!bucket.sparse() && s_.attempt.used[i] != 0) {
      continue;  // its gradient has been the view, or what was sent, since place()
    }
    auto& gradient = s_.layout.parameters[i].mutable_grad();
    if (keep_unused && s_.layout.tail->users(static_cast<int64_t>(i)) == 0) {
      gradient.reset();
    } else if (!bucket.sparse()) {
      gradient = bucket.direct ? bucket.own : s_.layout.views[i].over(slot.view);
    } else {
      gradient = bucket.own;
      if (scale != 1) {
        gradient._values().mul_(scale);
      }
    }
  }
  for (const auto i : s_.attempt.with_history) {
    const auto& slot = s_.layout.slots[i];
    auto& gradient = s_.layout.parameters[i].mutable_grad();
    gradient = with_history_of(slot.view.defined() ? slot.view : s_.layout.buckets[slot.bucket].own,
                               gradient);
  }
  if (s_.updates && !s_.attempt.uneven) {
    s_.updates->note_gradients();
  }
  forget_attempt();
  write_back_buffers();
  s_.tuner.propose(s_.layout, s_.watch, s_.attempt.step);
}

/// Where the rank whose buffers win had no data, which only a plain loop allows, each rank keeps its own.
void Engine::write_back_buffers() {
  const auto& winner = s_.layout.tail->records()[s_.attempt.buffer_source];
  if (!s_.attempt.plain || winner.verdict != Status::no_data) {
    s_.layout.tail->write_back_buffers();
  }
  if (auto& next = s_.tuner.next(); s_.layout.tail->has_new_sizes() && !next) {
    next = s_.layout.plan;
  }
}

void Engine::accept_nothing() {
  exchange_rows();  // the others wait for this rank, which has none
  discard();
  write_back_buffers();
  s_.tuner.note_agreed(s_.layout, s_.layout.tail->records()[0].plan);
  s_.tuner.propose(s_.layout, s_.watch, s_.attempt.step);
}

void Engine::discard() {
  for (const auto& parameter : s_.layout.parameters) {
    parameter.mutable_grad().reset();
  }
  forget_attempt();
}

void Engine::forget_attempt() {
  s_.attempt.with_history.clear();
  for (auto& bucket : s_.layout.buckets) {
    bucket.own.reset();
    bucket.hook_result.reset();
  }
  std::fill(s_.attempt.used.begin(), s_.attempt.used.end(), uint8_t{0});
}

std::vector<std::vector<uint8_t>> Engine::gather_bytes(const std::vector<uint8_t>& own,
                                                       const char* what) {
  driver_->give_way(/*to_step=*/false);
  exchange_in_turn();
  const memory::Unlimited unlimited;
  ++s_.counters.exchanges;
  s_.link.waiting_since = std::chrono::steady_clock::now();
  try {
    if (s_.link.broken) {
      std::rethrow_exception(s_.link.broken);
    }
    return exchange_bytes(s_.link.group, s_.link.device, own,
                          [&](c10d::Work& work) { s_.link.wait_for(work, s_.link.device); });
  } catch (const std::exception& e) {
    s_.link.broken = std::current_exception();
    s_.link.throw_broken(s_.attempt.step, what, e.what());
  }
}

std::vector<ControlRecord> exchange_records(Engine& engine, const ControlRecord& record) {
  const auto own = encode(record);
  std::vector<ControlRecord> records;
  for (const auto& bytes :
       engine.gather_bytes({own.begin(), own.end()}, "the exchange before a loop")) {
    RecordBytes theirs{};
    std::memcpy(theirs.data(), bytes.data(), theirs.size());
    records.push_back(decode(theirs));
  }
  return records;
}

}  // namespace brimful
