// Buckets leave in order: during backward as they fill (advance_early), the last one only when the step knows its verdict,
// and zeroed if this rank cannot do its part.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "reducer/device_wait.h"
#include "reducer/group_calls.h"
#include "reducer/reducer_state.h"

namespace brimful {

void Reducer::launch(int64_t index) {
  auto& s = *s_;
  open_turn();
  auto& bucket = s.buckets[index];
  bucket.join_current_stream();
  if (index == s.last()) {
    auto& record = s.outgoing.record;
    record.plan = s.proposal ? s.proposals : 0;
    const bool looks = s.updates && !s.joining && record.verdict < Status::retry;
    const auto updated = looks ? s.updates->look() : at::Tensor();
    s.tail->write(s.used, record, s.outgoing.loss_sum, updated, s.buffer_source, s.own_rows());
  }
  if (bucket.direct && !bucket.own.defined()) {
    const auto& owner = s.parameters[bucket.parameters[0]];
    bucket.own = owner.grad().defined() ? owner.grad() : at::zeros_like(owner);
  }
  if (bucket.wire) {
    bucket.wire->encode(s.row_of(bucket), s.wire_scale);
  }
  try {
    s.send(index);
  } catch (...) {  // from a communication hook: with zeros it would make the same collectives again
    if (s.collectives() != s.hook_began) {
      break_chain(std::current_exception());
    }
    throw;
  }
}

void Reducer::launch_drained(int64_t index, Fill fill) {
  auto& s = *s_;
  auto& bucket = s.buckets[index];
  if (index == s.last()) {
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
    let_go_of_earlier(index);
    bucket.gradients.zero_();
  }
  try {
    s.send(index);
  } catch (...) {  // from a communication hook: nothing else can match what the others wait for
    bucket.left = true;
    ++s.next;
    break_chain(std::current_exception());
  }
}

void Reducer::State::send(int64_t index) {
  auto& bucket = buckets[index];
  try {
    if (!broken && !alone) {
      require_group(bucket.device);
    }
  } catch (...) {
    broken = std::current_exception();
  }
  const bool sends = !broken && !ended && !alone && !bucket.sparse();  // rows follow (rows.cpp)
  watch.launch(index, bucket.device);
  const WithoutPythonObjects without;
  if (sends && is_hooked(index)) {
    auto passed = hook_bucket(index);
    ++counters.launches;
    last_hook.reset();
    last_hooked = index;
    hook_began = collectives();
    bucket.hooked = hook->runHook(passed);  // its errors are this rank's own
    last_hook = bucket.hooked;
  }
  bucket.left = true;
  bucket.left_at = std::chrono::steady_clock::now();
  if (sends && !bucket.hooked) {
    try {
      std::vector<at::Tensor> tensors{payload(bucket)};
      ++counters.launches;
      bucket.work = group->allreduce(tensors);
    } catch (...) {
      broken = std::current_exception();
    }
  }
  const auto bytes = bucket.sparse() ? int64_t{0} : static_cast<int64_t>(payload(bucket).nbytes());
  watch.launched(index, bucket.device, bucket.work, bytes,
                 static_cast<int64_t>(bucket.parameters.size()));
  ++next;  // behind the call: another participant may launch from now on
}

c10d::GradBucket Reducer::State::hook_bucket(int64_t index) const {
  const auto& bucket = buckets[index];
  auto row = row_of(bucket);
  if (parameters[bucket.parameters[0]].is_complex()) {
    row = at::view_as_complex(row.view({-1, 2}));
  }
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> members;
  for (const auto i : bucket.parameters) {
    const auto& parameter = parameters[i];
    const auto& view = slots[i].view;
    offsets.push_back(bucket.direct ? 0 : view.storage_offset() - row.storage_offset());
    lengths.push_back(parameter.numel());
    sizes.push_back(parameter.sizes());
    members.push_back(parameter);
  }
  const auto hooked =
      std::count_if(buckets.begin(), buckets.end() - 1, [](const auto& b) { return !b.sparse(); });
  const auto before = std::count_if(buckets.begin(), buckets.begin() + index,
                                    [](const auto& b) { return !b.sparse(); });
  return c10d::GradBucket(before, hooked, row, std::move(offsets), std::move(lengths),
                          std::move(sizes), std::move(members), std::nullopt);
}

void Reducer::advance_early() {
  auto& s = *s_;
  if (!s.launching || s.launch_late) {
    return;
  }
  while (s.next < s.last() && s.buckets[s.next].pending == 0 && s.hook_done() &&
         (s.before == nullptr || s.before->early_left())) {
    check_last_hook(/*throws=*/true);
    launch(s.next);
  }
  if (s.after != nullptr && early_left()) {
    s.after->advance();
  }
}

void Reducer::advance() {
  const std::lock_guard<std::mutex> lock(s_->mutex);
  advance_early();
}

bool Reducer::early_left() const {
  return s_->next >= s_->last() && s_->hook_done();
}

void Reducer::begin(int buffer_source) {
  auto& s = *s_;
  require_not_taken();
  settle();
  const std::lock_guard<std::mutex> lock(s.mutex);
  take_up_plan();
  s.begin_times();
  s.mode = State::Mode::managed;
  s.plain_step = false;
  s.backward_due = false;
  s.passed = false;
  s.unseen = 0;
  s.scale = s.sparse_scale = s.wire_scale = 1;
  s.hook_scale = s.world_size;  // a hook returns the mean, a step wants the sum
  s.buffer_source = buffer_source;
  s.late = false;
  s.reentrant = false;
  s.forward_open = false;
  std::fill(s.used.begin(), s.used.end(), uint8_t{0});
  start_backward(false);
}

void Reducer::begin_piece(bool last, const at::Tensor& loss) {
  const std::lock_guard<std::mutex> lock(s_->mutex);
  start_backward(last);
  if (loss.defined()) {
    loss.register_hook([weak = weak_from_this()](const at::Tensor&) {
      if (const auto reducer = weak.lock()) {
        reducer->s_->graph_task = torch::autograd::get_current_graph_task_id();
      }
    });
  }
}

void Reducer::collect_hook_results() {
  for (auto& bucket : s_->buckets) {
    if (bucket.hooked && !s_->broken) {
      wait_for_hook(*bucket.hooked);
    }
    if (bucket.hooked && !s_->broken && bucket.hooked->hasError() && s_->told_broken()) {
      s_->broken = bucket.hooked->exception_ptr();
    }
    if (bucket.hooked && !s_->broken) {
      bucket.hooked->waitAndThrow();
      auto result = s_->hook->parseHookResult(bucket.hooked->value());
      const auto expected = s_->row_of(bucket).numel();
      if (result.is_complex()) {
        result = at::view_as_real(result.resolve_conj());
      }
      TORCH_CHECK_VALUE(result.numel() == expected,
                        "a communication hook returned a tensor of another size than its bucket's "
                        "buffer (returned: ",
                        result.numel(), " real elements, buffer: ", expected,
                        "); return the mean of bucket.buffer() over the ranks");
      bucket.hook_result = std::move(result);
    }
  }
}

std::exception_ptr Reducer::State::error_of_hook(c10::ivalue::Future& result) const {
  if (result.hasError()) {
    return result.exception_ptr();
  }
  try {  // torch.futures.Future.set_exception() makes an exception the value
    hook->parseHookResult(result.value());
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

uint64_t Reducer::State::collectives() const {
  try {
    return group->getSequenceNumberForGroup();
  } catch (const std::exception&) {
    return 0;  // not every backend counts
  }
}

// The last hook has ended. One that fails where it makes more collectives otherwise leaves the other ranks waiting for
// the rest: whatever this rank sends next would meet those, and gloo ends a process for another size.
void Reducer::check_last_hook(bool throws) {
  auto& s = *s_;
  const auto hook = std::exchange(s.last_hook, nullptr);
  if (!hook || s.broken) {
    return;
  }
  const auto made = s.collectives() - s.hook_began;
  const auto usual = s.collectives_of_hook.find(s.last_hooked);
  const auto error = s.error_of_hook(*hook);
  if (!error) {
    s.collectives_of_hook.insert_or_assign(s.last_hooked, made);
    return;
  }
  if (s.told_broken()) {
    s.broken = error;
    return;
  }
  if (usual != s.collectives_of_hook.end() && usual->second != made) {
    break_chain(error);
  }
  if (throws) {
    std::rethrow_exception(error);
  }
}

void Reducer::wait_for_last_hook() {
  auto& s = *s_;
  if (!s.broken && !s.hook_done()) {
    wait_for_hook(*s.last_hook);
  }
}

Progress Reducer::progress() const {
  const auto& s = *s_;
  const auto done = [](const auto& bucket) { return bucket.pending == 0; };
  return {s.next, s.last() + 1,
          s.launching && !s.reentrant && std::all_of(s.buckets.begin(), s.buckets.end(), done),
          s.late};
}

void Reducer::launch_early(Fill fill) {
  launch_until(s_->last(), fill, nullptr);
}

void Reducer::launch_last(Fill fill, const Announcement& said) {
  launch_until(s_->last() + 1, fill, &said);
}

void Reducer::launch_until(int64_t end, Fill with, const Announcement* said) {
  auto& s = *s_;
  const std::lock_guard<std::mutex> lock(s.mutex);
  const memory::Unlimited unlimited;
  std::optional<memory::UnlimitedEverywhere> also_the_groups_threads;
  if (s.hook) {  // its later collectives allocate there, where a refusal could only break the group
    also_the_groups_threads.emplace();
  }
  const bool own = with == Fill::gradients;
  const at::AutoGradMode no_grad_to_drain(own && at::GradMode::is_enabled());
  if (said != nullptr) {
    s.outgoing = *said;
  }
  if (own && said != nullptr) {
    s.outgoing.record.work_ms = static_cast<float>(s.watch.end_work(s.agreeing_ms()));
    collect_hook_results();
  } else if (said != nullptr && s.next <= s.last()) {
    s.buckets.back().join_current_stream();
    let_go_of_earlier(s.last());
    s.buckets.back().gradients.zero_();
  }
  s.completing = s.completing || own;
  open_turn();
  while (s.next < end) {
    if (own) {
      fill(s.next);
    }
    wait_for_last_hook();
    check_last_hook(/*throws=*/own);
    if (own) {
      launch(s.next);
    } else {
      launch_drained(s.next, with);
    }
  }
  wait_for_last_hook();  // of the early part: other modules' buckets may follow
}

}  // namespace brimful
