// Buckets are launched in order: during backward as they fill (advance_early), the last one only when the step knows its
// verdict, and zeroed if this rank cannot do its part.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "reducer/engine.h"
#include "reducer/group_calls.h"

namespace brimful {

void Engine::launch(int64_t index) {
  open_turn();
  auto& bucket = s_.layout.buckets[index];
  bucket.join_current_stream();
  if (index == s_.layout.last()) {
    auto& record = s_.attempt.outgoing.record;
    record.plan = s_.tuner.proposed();
    record.updated.fill(s_.updates ? kUpdateUnknown : kUpdateNotCompared);
    const bool looks = s_.updates && !s_.attempt.uneven && record.verdict < Status::retry;
    const auto updated = looks ? s_.updates->look() : at::Tensor();
    s_.layout.tail->write(s_.attempt.used, record, s_.attempt.outgoing.loss_sum, updated,
                          s_.attempt.buffer_source, s_.layout.own_rows());
  }
  if (bucket.direct && !bucket.own.defined()) {
    const auto& owner = s_.layout.parameters[bucket.parameters[0]];
    bucket.own = owner.grad().defined() ? owner.grad() : at::zeros_like(owner);
  }
  if (bucket.wire) {
    bucket.wire->encode(s_.layout.row_of(bucket), s_.attempt.scales.wire);
  }
  try {
    send(index);
  } catch (...) {
    s_.hooks.note_failed_launch(std::current_exception(), s_.attempt.step);
    throw;
  }
}

void Engine::launch_drained(int64_t index, Fill fill) {
  auto& bucket = s_.layout.buckets[index];
  if (index == s_.layout.last()) {
    launch(index);
    return;
  }
  bucket.join_current_stream();
  if (bucket.sparse()) {
    bucket.own.reset();
  } else if (bucket.wire) {
    bucket.wire->clear();
  } else if (bucket.direct) {
    bucket.own = fill == Fill::zeros ? at::zeros_like(bucket.drain) : bucket.drain;
  } else {
    s_.layout.let_go_of_earlier(index);
    bucket.gradients.zero_();
  }
  try {
    send(index);
  } catch (...) {  // from a communication hook: nothing else can match what the others wait for
    bucket.launched = true;
    ++s_.attempt.next;
    s_.link.give_up(std::current_exception(), s_.attempt.step);
  }
}

void Engine::send(int64_t index) {
  auto& bucket = s_.layout.buckets[index];
  auto& link = s_.link;
  if (!link.broken && !link.alone) {
    link.call([&] { link.require(bucket.device); });
  }
  const bool sends =
      !link.broken && !s_.turns.ended && !link.alone && !bucket.sparse();  // rows follow (rows.cpp)
  s_.watch.launch(index, bucket.device);
  const WithoutPythonObjects without;
  if (sends && s_.hooks.takes(s_.layout, index)) {
    ++s_.counters.launches;
    s_.hooks.run(s_.layout, index);
  }
  bucket.launched = true;
  bucket.launched_at = std::chrono::steady_clock::now();
  if (sends && !bucket.hooked) {
    link.call([&] {
      std::vector<at::Tensor> tensors{s_.layout.payload(bucket)};
      ++s_.counters.launches;
      bucket.work = link.group->allreduce(tensors);
    });
  }
  const auto bytes =
      bucket.sparse() ? int64_t{0} : static_cast<int64_t>(s_.layout.payload(bucket).nbytes());
  s_.watch.launched(index, bucket.device, bucket.work, bytes,
                    static_cast<int64_t>(bucket.parameters.size()));
  ++s_.attempt.next;  // behind the call: another participant may launch from now on
}

void Engine::advance_early() {
  if (!s_.attempt.launching || s_.late.launch_late) {
    return;
  }
  while (s_.attempt.next < s_.layout.last() && s_.layout.buckets[s_.attempt.next].pending == 0 &&
         s_.hooks.is_done() &&
         (s_.attempt.before == nullptr || s_.attempt.before->launched_early())) {
    s_.hooks.check(/*throws=*/true, s_.attempt.step);
    launch(s_.attempt.next);
  }
  if (s_.attempt.after != nullptr && launched_early()) {
    s_.attempt.after->advance();
  }
}

void Engine::advance() {
  const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
  advance_early();
}

bool Engine::launched_early() const {
  return s_.attempt.next >= s_.layout.last() && s_.hooks.is_done();
}

Progress Engine::progress() const {
  const auto done = [](const auto& bucket) { return bucket.pending == 0; };
  return {s_.attempt.next, s_.layout.last() + 1,
          s_.attempt.launching && !s_.late.reentrant &&
              std::all_of(s_.layout.buckets.begin(), s_.layout.buckets.end(), done),
          s_.late.came};
}

void Engine::launch_early(Fill fill) {
  launch_until(s_.layout.last(), fill, nullptr);
}

void Engine::launch_last(Fill fill, const Announcement& said) {
  launch_until(s_.layout.last() + 1, fill, &said);
}

void Engine::launch_until(int64_t end, Fill with, const Announcement* said) {
  const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
  const memory::Unlimited unlimited;
  std::optional<memory::UnlimitedEverywhere> also_the_groups_threads;
  if (s_.hooks
          .is_set()) {  // its later collectives allocate there, where a refusal could only break the group
    also_the_groups_threads.emplace();
  }
  const bool own = with == Fill::gradients;
  const at::AutoGradMode no_grad_to_drain(own && at::GradMode::is_enabled());
  if (said != nullptr) {
    s_.attempt.outgoing = *said;
  }
  if (own && said != nullptr) {
    s_.attempt.outgoing.record.work_ms =
        static_cast<float>(s_.watch.end_work(s_.turns.agreeing_ms()));
    s_.hooks.collect(s_.layout);
  } else if (said != nullptr && s_.attempt.next <= s_.layout.last()) {
    s_.layout.buckets.back().join_current_stream();
    s_.layout.let_go_of_earlier(s_.layout.last());
    s_.layout.buckets.back().gradients.zero_();
  }
  s_.attempt.completing = s_.attempt.completing || own;
  open_turn();
  while (s_.attempt.next < end) {
    if (own) {
      fill(s_.attempt.next);
    }
    s_.hooks.wait();
    s_.hooks.check(/*throws=*/own, s_.attempt.step);
    if (own) {
      launch(s_.attempt.next);
    } else {
      launch_drained(s_.attempt.next, with);
    }
  }
  s_.hooks.wait();  // of the early part: other modules' buckets may follow
}

}  // namespace brimful
