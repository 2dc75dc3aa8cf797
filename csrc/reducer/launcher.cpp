// Buckets on their way to the process group, and the wait for them.
#include "reducer/launcher.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "reducer/group_calls.h"

namespace brimful {

bool Launcher::may_launch_early() const {
  return next_ < layout_.last() && layout_.buckets[next_].pending == 0 && hooks_.is_done() &&
         (before_ == nullptr || before_->launched_early());
}

void Launcher::advance_after() const {
  if (after_ != nullptr && launched_early()) {
    after_->advance();
  }
}

void Launcher::launch(const Scales& scales, int64_t step, bool sends) {
  auto& bucket = layout_.buckets[next_];
  if (bucket.direct && !bucket.own.defined()) {
    const auto& owner = layout_.parameters[bucket.parameters[0]];
    bucket.own = owner.grad().defined() ? owner.grad() : at::zeros_like(owner);
  }
  if (bucket.wire) {
    bucket.wire->encode(layout_.row_of(bucket), scales.wire);
  }
  try {
    send(sends);
  } catch (...) {
    hooks_.note_failed_launch(std::current_exception(), step);
    throw;
  }
}

void Launcher::launch_drained(Fill fill, int64_t step, bool sends) {
  auto& bucket = layout_.buckets[next_];
  bucket.join_current_stream();
  if (bucket.sparse()) {
    bucket.own.reset();
  } else if (bucket.wire) {
    bucket.wire->clear();
  } else if (bucket.direct) {
    bucket.own = fill == Fill::zeros ? at::zeros_like(bucket.drain) : bucket.drain;
  } else {
    layout_.let_go_of_earlier(next_);
    bucket.gradients.zero_();
  }
  try {
    send(sends);
  } catch (...) {  // from a communication hook: nothing else can match what the others wait for
    bucket.launched = true;
    ++next_;
    link_.give_up(std::current_exception(), step);
  }
}

void Launcher::send(bool sends) {
  const int64_t index = next_;
  auto& bucket = layout_.buckets[index];
  if (!link_.is_broken() && !link_.alone) {
    link_.call([&] { link_.require(bucket.device); });
  }
  sends = sends && !link_.is_broken() && !link_.alone;
  // Of gradients and tail, on all ranks alike. Rows follow (rows.cpp).
  const auto numel = bucket.sparse() ? int64_t{0} : layout_.payload(bucket).numel();
  sends = sends && numel > 0;
  watch_.launch(index, bucket.device);
  const WithoutPythonObjects without;
  if (sends && hooks_.takes(layout_, index)) {
    link_.count(&Reducer::Counters::launches);
    hooks_.run(layout_, index);
  }
  bucket.launched = true;
  bucket.launched_at = std::chrono::steady_clock::now();
  if (sends && !bucket.hooked) {
    link_.call([&] {
      std::vector<at::Tensor> tensors{layout_.payload(bucket)};
      link_.count(&Reducer::Counters::launches);
      bucket.work = link_.group->allreduce(tensors);
    });
  }
  const auto bytes =
      bucket.sparse() ? int64_t{0} : static_cast<int64_t>(layout_.payload(bucket).nbytes());
  watch_.launched(index, bucket.device, bucket.work, bytes,
                  static_cast<int64_t>(bucket.parameters.size()));
  ++next_;  // after the call: another participant may launch from now on
}

void Launcher::begin_wait() {
  watch_.begin_wait();
  if (!link_.is_broken()) {
    link_.begin_wait();
  }
}

void Launcher::forget(int64_t index) {
  auto& bucket = layout_.buckets[index];
  watch_.waited(index);
  bucket.work.reset();
  bucket.hooked.reset();
  bucket.launched = false;
}

void Launcher::end_wait() {
  watch_.end_wait();
  hooks_.forget_last();
}

void Launcher::wait_for_all() {
  begin_wait();
  for (int64_t i = 0; i <= layout_.last(); ++i) {
    auto& bucket = layout_.buckets[i];
    if (bucket.work && !link_.is_broken()) {
      link_.call([&] { link_.wait_for(*bucket.work, bucket.device, nullptr, bucket.launched_at); });
    } else if (bucket.hooked && !link_.is_broken()) {
      link_.wait_for(*bucket.hooked);
    }
    forget(i);
  }
  end_wait();
  link_.count(&Reducer::Counters::host_waits);
}

c10::intrusive_ptr<c10d::Work> Launcher::queue_waits() {
  begin_wait();
  c10::intrusive_ptr<c10d::Work> last;
  for (int64_t i = 0; i <= layout_.last(); ++i) {
    auto& bucket = layout_.buckets[i];
    if (bucket.work && !link_.is_broken()) {
      link_.call([&] { bucket.work->wait(); });
      last = bucket.work;
    } else if (bucket.hooked && !link_.is_broken()) {
      link_.wait_for(*bucket.hooked);
    }
    forget(i);
  }
  end_wait();
  return last;
}

bool Launcher::has_ended() const {
  return std::all_of(layout_.buckets.begin(), layout_.buckets.end(),
                     [](const auto& bucket) { return !bucket.work || bucket.work->isCompleted(); });
}

void Launcher::end() {
  next_ = 0;
  set_order(nullptr, nullptr);
}

}  // namespace brimful
