// The end of a step: one wait, the verdict of all ranks, and gradients that are kept or thrown away.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "reducer/reducer_state.h"

namespace brimful {

void Reducer::wait_for_buckets() {
  auto& s = *s_;
  s.watch.begin_wait();
  if (!s.broken) {
    s.waiting_since = std::chrono::steady_clock::now();
  }
  for (size_t i = 0; i < s.buckets.size(); ++i) {
    auto& bucket = s.buckets[i];
    if (bucket.work && !s.broken) {
      try {
        wait_for(*bucket.work, bucket.device, bucket.left_at);
      } catch (...) {
        s.broken = std::current_exception();
      }
    } else if (bucket.hooked && !s.broken) {
      wait_for_hook(*bucket.hooked);
    }
    s.watch.waited(static_cast<int64_t>(i));
    bucket.work.reset();
    bucket.hooked.reset();
    bucket.left = false;
  }
  s.watch.end_wait();
  s.last_hook.reset();
  s.met.reset();
  ++s.counters.host_waits;
}

void Reducer::end_attempt() {
  auto& s = *s_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.next = 0;
  s.mode = State::Mode::idle;
  s.launching = false;
  s.completing = false;
  s.opened = s.closed = s.ended = false;
  s.outgoing.loss_sum.reset();
  s.before = nullptr;
  s.after = nullptr;
  ++s.step;
  ++s.counters.steps;
}

Ending Reducer::finish() {
  auto& s = *s_;
  wait_for_buckets();
  if (s.ended && !s.broken) {
    end_turn();
  }
  end_attempt();
  if (s.broken) {
    throw_broken(s.step - 1, "a step", describe(s.broken));
  }
  s.tail->read();
  std::vector<float> ms_by_rank;
  for (const auto& record : s.tail->records()) {
    ms_by_rank.push_back(record.work_ms);
  }
  s.watch.end_step(s.step - 1, ms_by_rank, s.agreeing_ms());
  const auto records = s.tail->records();
  if (s.updates && !s.joining && worst(records) < Status::retry) {
    s.updates->settle(records, [&](const ControlRecord& own) { return exchange(own); });
  }
  return {records, s.updates && !s.joining ? s.updates->divergence() : std::string()};
}

void Reducer::accept(double scale, bool keep_unused) {
  auto& s = *s_;
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  exchange_rows();
  s.hear_of_plan(s.tail->records()[0].plan);  // first: if anything fails here, the plan stands
  const double carry =
      s.plain_step ? 1.0 : scale;  // in a plain loop the next step has the same scale
  for (auto& bucket : s.buckets) {
    if (bucket.sparse()) {
      continue;
    }
    const auto row = s.row_of(bucket);
    if (bucket.wire) {
      bucket.wire->decode(row, scale, carry);
      continue;
    }
    if (bucket.hook_result.defined() && !bucket.hook_result.is_alias_of(row)) {
      row.copy_(bucket.hook_result.reshape({-1}));
    }
    const double factor = bucket.hook_result.defined() ? scale * s.hook_scale : scale;
    if (factor != 1) {
      row.mul_(factor);
    }
  }
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    const auto& slot = s.slots[i];
    const auto& bucket = s.buckets[slot.bucket];
    if (!bucket.sparse() && s.used[i] != 0) {
      continue;  // its gradient has been the view, or what was sent, since place()
    }
    auto& gradient = s.parameters[i].mutable_grad();
    if (keep_unused && s.tail->users(static_cast<int64_t>(i)) == 0) {
      gradient.reset();
    } else if (!bucket.sparse()) {
      gradient = bucket.direct ? bucket.own : s.views[i].over(slot.view);
    } else {
      gradient = bucket.own;
      if (scale != 1) {
        gradient._values().mul_(scale);
      }
    }
  }
  for (const auto i : s.with_history) {
    const auto& slot = s.slots[i];
    auto& gradient = s.parameters[i].mutable_grad();
    gradient =
        with_history_of(slot.view.defined() ? slot.view : s.buckets[slot.bucket].own, gradient);
  }
  forget_attempt();
  if (!std::exchange(s.keep_buffers, false)) {
    s.tail->write_back_buffers();
  }
  s.propose_plan();
}

void Reducer::discard() {
  for (const auto& parameter : s_->parameters) {
    parameter.mutable_grad().reset();
  }
  forget_attempt();
}

void Reducer::forget_attempt() {
  s_->with_history.clear();
  for (auto& bucket : s_->buckets) {
    bucket.own.reset();
    bucket.hook_result.reset();
  }
  std::fill(s_->used.begin(), s_->used.end(), uint8_t{0});
}

std::vector<ControlRecord> Reducer::exchange(const ControlRecord& record) {
  auto& s = *s_;
  require_not_taken();
  settle();
  exchange_in_turn();
  const memory::Unlimited unlimited;
  const auto own = encode(record);
  ++s.counters.exchanges;
  s.waiting_since = std::chrono::steady_clock::now();
  std::vector<std::vector<uint8_t>> all;
  try {
    if (s.broken) {
      std::rethrow_exception(s.broken);
    }
    all = exchange_bytes(s.group, s.device, {own.begin(), own.end()},
                         [&](c10d::Work& work) { wait_for(work, s.device); });
  } catch (const std::exception& e) {
    s.broken = std::current_exception();
    throw_broken(s.step, "the exchange before a loop", e.what());
  }
  std::vector<ControlRecord> records;
  for (const auto& bytes : all) {
    RecordBytes theirs{};
    std::memcpy(theirs.data(), bytes.data(), theirs.size());
    records.push_back(decode(theirs));
  }
  return records;
}

}  // namespace brimful
