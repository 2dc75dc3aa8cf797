#include <ATen/Parallel.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/step/oom.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>
#include <unistd.h>

#include <algorithm>

#include "pipeline/executor/caller_state.h"
#include "pipeline/executor/draw_watch.h"
#include "pipeline/executor/executor_impl.h"

namespace brimful::pipeline {
namespace {
using Clock = std::chrono::steady_clock;

std::string split_note_of(const StageRun& run) {
  if (!run.again.joined_parts) {
    return run.split_note;
  }
  return is_offloaded(run.again.rung)
             ? "not split: the stage is offloaded, and two parts would hold gradients between them"
             : "not split: the stage is recomputed, which is done once in a whole backward";
}
std::atomic<uint64_t> executors{0};

int64_t now_ns() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}
}  // namespace

Executor::Executor(std::vector<Stage> stages, ExecutorOptions options)
    : impl_(std::make_shared<Impl>(std::move(stages), std::move(options))) {}
Executor::~Executor() = default;
StepResult Executor::run(const Schedule& schedule, const StepWork& work) {
  return impl_->run(schedule, work);
}
void Executor::cancel() {
  impl_->end_from_outside();
}
const std::vector<Stage>& Executor::stages() const {
  return impl_->stages;
}
const ExecutorOptions& Executor::options() const {
  return impl_->options;
}
int Executor::ranks() const {
  return impl_->all_ranks();
}

Executor::Impl::Impl(std::vector<Stage> stages_of_model, ExecutorOptions wanted)
    : stages(std::move(stages_of_model)),
      options(std::move(wanted)),
      bells_(ranks()),
      places_(ranks()),
      turns_(options.devices, signals_.cancelled),
      number_(++executors) {
  TORCH_CHECK_VALUE(!stages.empty(), "a pipeline has at least one stage (stages: 0)");
  TORCH_CHECK_VALUE(
      !options.devices.empty() && options.devices.size() <= stages.size(),
      "a pipeline has one device for each rank, and at least one stage for each (devices: ",
      options.devices.size(), ", stages: ", stages.size(), ")");
  TORCH_CHECK_VALUE(!options.peers || ranks() == 1,
                    "a process of several has one rank, with one device (devices: ", ranks(), ")");
  const bool crowded = ranks() > static_cast<int>(std::thread::hardware_concurrency());
  for (auto& bell : bells_) {
    bell.set_spin(crowded ? std::chrono::microseconds(0) : options.spin);
  }
  const int callers_threads = at::get_num_threads();
  idle_.running.store(ranks(), std::memory_order_relaxed);
  try {
    for (int rank = 0; rank < ranks(); ++rank) {
      threads_.emplace_back([this, rank, callers_threads] {
        at::get_num_threads();  // a thread's first look would else undo what is set here
        const int share = std::max(1, callers_threads / ranks());
        at::set_num_threads(options.threads_per_rank > 0 ? options.threads_per_rank : share);
        thread_main(rank);
      });
    }
  } catch (...) {  // those that began would be joined for ever
    stop();
    throw;
  }
  await_ranks();
  at::set_num_threads(callers_threads);  // of threads to come: the stages have set it for all
}

Executor::Impl::~Impl() {
  if (is_forked()) {
    for (auto& thread : threads_) {
      thread.detach();
    }
    return;
  }
  stop();
}

void Executor::Impl::stop() {
  signals_.stop.store(true, std::memory_order_release);
  for (auto& bell : bells_) {
    bell.ring();
  }
}

bool Executor::Impl::is_forked() const {
  return ::getpid() != process_;
}

StepResult Executor::Impl::run(const Schedule& schedule, const StepWork& work) {
  TORCH_CHECK(!abandoned_.is, "the pipeline was abandoned (under way: ", abandoned_.text,
              "); make a new one");
  TORCH_CHECK_VALUE(!is_forked(),
                    "a pipeline cannot be used in a forked process (made in process: ", process_,
                    "); make it there");
  placed_.place(schedule);
  Job job{schedule, work};
  job.caller.emplace();
  job.result.begin_ns = now_ns();
  turns_.resize(schedule.stages);
  placed_.begin(schedule, work, turns_);
  job.result.losses.resize(work.loss ? static_cast<size_t>(schedule.microbatches) : 0);
  job.result.outputs.resize(work.loss ? 0 : static_cast<size_t>(schedule.microbatches));
  job.result.times.resize(all_ranks());
  job.keep_casts = at::autocast::is_autocast_cache_enabled();
  for (const auto device : options.devices) {
    job.autocast |= at::autocast::is_autocast_enabled(device.type());
    if (!device.is_cpu()) {
      job.streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }
  begin_job(std::move(job));
  turns_.begin();
  wake_ranks();
  std::exception_ptr interrupted;
  if (!await_end(interrupted)) {
    abandon();
    StepResult left;
    left.interrupted = std::move(interrupted);
    left.cancelled = left.abandoned = true;
    return left;
  }
  placed_.flush();
  auto result = std::move(job_.result);
  end_job();
  skips_.clear();
  result.end_ns = now_ns();
  result.interrupted = std::move(interrupted);
  finish(schedule, result);
  return result;
}

void Executor::Impl::wake_ranks() {
  signals_.cancelled.store(false, std::memory_order_relaxed);
  signals_.ended.store(false, std::memory_order_relaxed);
  idle_.running.store(ranks(), std::memory_order_relaxed);
  for (auto& place : places_) {
    place.idle.store(false, std::memory_order_relaxed);
  }
  job_number_.fetch_add(1, std::memory_order_release);
  for (auto& bell : bells_) {
    bell.ring();
  }
}

void Executor::Impl::finish(const Schedule& schedule, StepResult& result) {
  result.cancelled = signals_.ended.exchange(false, std::memory_order_acq_rel);
  std::string left;
  for (auto& run : placed_.runs()) {
    result.peak_live.push_back(run.held.peak);
    result.peak_live_bytes.push_back(run.held.peak_bytes);
    result.split_notes.push_back(split_note_of(run));
    result.refusals.push_back(run.again.refusal);
    std::move(run.caller_gradients.begin(), run.caller_gradients.end(),
              std::back_inserter(result.caller_gradients));
    run.caller_gradients.clear();
    left = left.empty() && run.stage != nullptr ? run.left_undone() : left;
  }
  const bool is_cancelled =
      signals_.cancelled.load(std::memory_order_relaxed) || result.interrupted;
  result.drew_together = turns_.end(!is_cancelled && left.empty());
  if (is_cancelled || !left.empty()) {  // what was under way pins memory
    result.caller_gradients.clear();
    placed_.drop_all(schedule.microbatches);
  }
  TORCH_CHECK_VALUE(is_cancelled || left.empty(), "the schedule has ended with work left (", left,
                    " and what comes after it); check() says what is missing");
}

void Executor::Impl::thread_main(int rank) {
  c10::setThreadName("pipeline " + std::to_string(rank));
  const auto scope = options.thread_scope ? options.thread_scope() : nullptr;
  enter_thread();
  end_work(rank);
  uint64_t done = 0;
  while (true) {
    bells_[rank].wait_until([&] {
      return job_number_.load(std::memory_order_acquire) != done ||
             signals_.stop.load(std::memory_order_acquire);
    });
    if (signals_.stop.load(std::memory_order_acquire)) {
      return leave_thread();
    }
    ++done;
    run_rank(rank);
    end_work(rank);
  }
}

void Executor::Impl::run_rank(int rank) {
  const c10::DeviceGuard device(options.devices[rank]);
  std::optional<c10::MultiStreamGuard> streams;  // of all devices: a copy waits for its source's
  if (!job_.streams.empty()) {
    streams.emplace(job_.streams);
  }
  const CallerState state(*job_.caller, job_.autocast, job_.keep_casts);
  const EvidenceScope evidence(options.devices[rank]);
  const DrawWatch watch(turns_.watches());
  const auto scope = job_.work.thread_scope ? job_.work.thread_scope() : nullptr;
  RankRun run(job_.work, skips_, job_.result, options.trace, places_[rank].waits, turns_, rank,
              signals_.cancelled);
  run_actions(placed_.first_rank() + rank, run);
  if (signals_.cancelled.load(std::memory_order_acquire)) {
    placed_.drop(placed_.first_rank() + rank);
  }
}

void Executor::Impl::run_actions(int rank, RankRun& run) {
  const auto& order = job_.schedule.ranks[rank];
  auto& times = job_.result.times[rank];
  int64_t began = 0;
  auto& place = places_[rank - placed_.first_rank()];
  if (options.trace) {
    times.reserve(order.size());
    began = now_ns();
  }
  for (size_t i = 0; i < order.size(); ++i) {
    if (signals_.cancelled.load(std::memory_order_relaxed)) {
      return drain(rank, i, run);
    }
    const auto& action = order[i];
    place.began_ns.store(began, std::memory_order_relaxed);
    place.done.store(static_cast<int64_t>(i), std::memory_order_relaxed);
    std::exception_ptr error;
    try {
      if (job_.work.refused) {
        std::rethrow_exception(job_.work.refused);
      }
      if (options.before_action) {
        options.before_action(rank, static_cast<int>(i), action);
      }
      run.run(placed_.runs()[action.stage], action);
    } catch (const PeerFailed&) {
      job_.result.peer_failed = true;
      cancel();
      return drain(rank, i, run);
    } catch (const Cancelled&) {
      return drain(rank, i, run);
    } catch (...) {
      error = std::current_exception();
      if (options.translate) {
        error = options.translate(std::move(error));
      }
    }
    if (error) {
      note_failure(rank, static_cast<int>(i), std::move(error));
      return drain(rank, i, run);
    }
    if (options.trace) {
      const auto ended = now_ns();
      times.push_back({action, run.waited_ns(), began + run.waited_ns(), ended});
      began = ended;
    }
  }
  place.done.store(std::ssize(order), std::memory_order_relaxed);
}

// Other processes wait for the messages of this one, and send theirs, whatever has happened: each is made up for by one
// that says so.
void Executor::Impl::drain(int rank, size_t from, RankRun& run) {
  if (!options.peers) {
    return;
  }
  placed_.drop(rank);  // what comes needs memory
  const auto& order = job_.schedule.ranks[rank];
  for (size_t i = from; i < order.size(); ++i) {
    run.make_up(placed_.runs()[order[i].stage], order[i]);
  }
}

}  // namespace brimful::pipeline
