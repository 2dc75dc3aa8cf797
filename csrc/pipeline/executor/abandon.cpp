// How a run ends, where not all actions have run: by a failure, or from outside, which does not wait for ever.
#include <ATen/core/Tensor.h>
#include <brimful/log.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/step/oom.h>

#include "pipeline/executor/executor_impl.h"
#include "pipeline/schedule/action_sentence.h"

namespace brimful::pipeline {
namespace {
constexpr std::chrono::milliseconds kLook{50};

/// Of the executor whose thread this is; each has a number of its own.
thread_local uint64_t executor_here = 0;
}  // namespace

void Executor::Impl::enter_thread() const {
  executor_here = number_;
}

ActionFailure::ActionFailure(int of_rank, int at_index, std::exception_ptr what)
    : Failure(failure_of(what)), index(at_index) {
  rank = of_rank;
  error = kind == Status::out_of_memory ? nullptr : std::move(what);
}

// Called when the handler has ended, so that only the pointer pins the frames in which memory ran out.
void Executor::Impl::note_failure(int rank, int index, std::exception_ptr error) {
  {
    const std::lock_guard lock(failure_mutex_);
    if (!job_.result.failure) {
      ActionFailure failure(rank, index, std::move(error));
      failure.action = job_.schedule.ranks[rank][index];
      const auto& run = placed_.runs()[failure.action.stage];
      failure.stage = run.stage->name;
      failure.shapes = run.flights[failure.action.microbatch].input_shapes();
      job_.result.failure = std::move(failure);
    }
  }
  cancel();
}

void Executor::Impl::end_from_outside() {
  signals_.ended.store(true, std::memory_order_relaxed);
  cancel();
}

void Executor::Impl::cancel() {
  signals_.cancelled.store(true, std::memory_order_release);
  for (auto& bell : bells_) {
    bell.ring();
  }
}

void Executor::Impl::end_work(int rank) {
  places_[rank].idle.store(true, std::memory_order_release);
  const std::lock_guard lock(idle_.mutex);
  if (idle_.running.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    idle_.all.notify_all();
  }
}

void Executor::Impl::await_ranks() {
  std::unique_lock lock(idle_.mutex);
  idle_.all.wait(lock, [&] { return idle_.running.load(std::memory_order_acquire) == 0; });
}

bool Executor::Impl::await_ranks(std::chrono::milliseconds patience) {
  std::unique_lock lock(idle_.mutex);
  return idle_.all.wait_for(lock, patience,
                            [&] { return idle_.running.load(std::memory_order_acquire) == 0; });
}

void Executor::Impl::ask_for_interrupt(std::exception_ptr& thrown) const {
  if (!options.interrupt) {
    return;
  }
  try {
    options.interrupt();
  } catch (...) {
    thrown = std::current_exception();
  }
}

bool Executor::Impl::await_end(std::exception_ptr& interrupted) {
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> end;
  while (!await_ranks(kLook)) {
    std::exception_ptr again;
    ask_for_interrupt(interrupted ? again : interrupted);
    if (interrupted) {
      cancel();
    }
    if (again) {
      return false;
    }
    if (!end && (interrupted || signals_.ended.load(std::memory_order_acquire))) {
      end = Clock::now() + options.patience;
    }
    if (end && Clock::now() >= *end && !await_ranks(std::chrono::milliseconds(0))) {
      return false;
    }
  }
  if (!interrupted) {
    ask_for_interrupt(interrupted);
  }
  return true;
}

// Their threads go on; this object lives as long as the last of them.
void Executor::Impl::abandon() {
  std::string text;
  for (int i = 0; i < ranks(); ++i) {
    if (places_[i].idle.load(std::memory_order_acquire)) {
      continue;
    }
    const auto& order = job_.schedule.ranks[placed_.first_rank() + i];
    const auto done = places_[i].done.load(std::memory_order_relaxed);
    if (done < std::ssize(order)) {
      text += (text.empty() ? "" : ", ") + to_string(order[done]) + " (" +
              to_sentence(order[done]) + ")";
    }
    for (const auto& run : placed_.runs()) {
      if (placed_.rank_of(run.index) == placed_.first_rank() + i) {
        drop_late_gradients(*run.stage);
      }
    }
  }
  abandoned_.text = text.empty() ? "the end of a step" : text;
  turns_.abandon();
  abandoned_.self = shared_from_this();
  abandoned_.is.store(true, std::memory_order_release);
  for (auto& thread : threads_) {
    thread.detach();
  }
  stop();
  log(LogLevel::warning, "a step was ended while " + abandoned_.text +
                             " went on; the pipeline cannot be used any more");
}

// What comes out of an abandoned backward would be added to the gradients of steps that the program makes without it.
void Executor::Impl::drop_late_gradients(const Stage& stage) {
  for (const auto& parameter : stage.parameters) {
    if (parameter.requires_grad()) {
      // A sum that is under way writes there.
      abandoned_.late_gradients.push_back(parameter.grad());
      parameter.register_hook([number = number_](const at::Tensor& /*gradient*/) {
        if (executor_here == number) {
          throw Cancelled();
        }
      });
    }
  }
}

void Executor::Impl::leave_thread() {
  if (threads_left_.fetch_sub(1, std::memory_order_acq_rel) == 1 &&
      abandoned_.is.load(std::memory_order_acquire)) {
    const auto self = std::move(abandoned_.self);
  }
}

std::string Executor::Impl::abandoned() const {
  return abandoned_.is.load(std::memory_order_acquire) ? abandoned_.text : "";
}

std::string Executor::abandoned() const {
  return impl_->abandoned();
}

}  // namespace brimful::pipeline
