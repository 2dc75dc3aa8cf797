// A reducer in a plain loop: nobody drives it, so it finds the beginning of a backward in a hook on the module's output,
// its end in a callback of the engine, and a backward that died in the destruction of that callback.
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <thread>

#include "reducer/reducer_state.h"

namespace brimful {
namespace {
constexpr int64_t kTextPatience = 1000;  // ms
constexpr const char* kUnknown = "unknown (see that rank's own output)";
}  // namespace

void Reducer::prepare_forward() {
  auto& s = *s_;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (s.mode != State::Mode::idle && !s.died) {
      return;
    }
  }
  if (s.died) {
    abort_step(FailureKind::error, kUnknown);  // its error was swallowed inside the scope
  }
  if (s.forward_open && !s.aborted) {
    abort_step(FailureKind::error, kUnknown);  // the last forward never ended
  }
  settle();
  s.forward_open = s.sync && at::GradMode::is_enabled();
}

void Reducer::forward_done() {
  s_->forward_open = false;
}

void Reducer::watch(const at::Tensor& output) {
  if (!output.requires_grad()) {
    return;
  }
  output.register_hook([weak = weak_from_this()](const at::Tensor&) {
    if (const auto reducer = weak.lock()) {
      const std::lock_guard<std::mutex> lock(reducer->s_->mutex);
      if (reducer->s_->mode == State::Mode::idle) {
        reducer->begin_plain_backward();
      }
    }
  });
}

bool Reducer::begin_plain_backward() {
  auto& s = *s_;
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (selected == nullptr || !selected->empty()) {
    return false;  // autograd.grad or backward(inputs=...): not a training step's backward
  }
  struct Guard {
    std::weak_ptr<Reducer> reducer;
    bool ended = false;
    ~Guard() {
      const auto alive = ended ? nullptr : reducer.lock();
      if (alive) {
        alive->plain_backward_died();
      }
    }
  };
  auto guard = std::make_shared<Guard>();
  guard->reducer = weak_from_this();
  torch::autograd::Engine::get_default_engine().queue_callback([guard = std::move(guard)] {
    guard->ended = true;
    if (const auto reducer = guard->reducer.lock()) {
      reducer->end_plain_backward();
    }
  });
  s.mode = State::Mode::plain;
  s.forward_open = false;
  s.ooms_before = memory::stats(s.device).ooms;
  s.scale = 1.0;
  if (s.sync) {
    s.scale = 1.0 / s.world_size;
    s.buffer_source = 0;
    s.late = false;
    s.record = {};
    s.record.verdict = Verdict::ok;
    s.record.weight = 1;
    if (s.untold) {
      s.record.verdict =
          s.untold->first == FailureKind::out_of_memory ? Verdict::failed_memory : Verdict::failed;
      publish_failure(s.untold->first, s.untold->second);
      s.untold.reset();
    }
    s.before = nullptr;
    s.after = nullptr;
  }
  start_backward(s.sync);
  return true;
}

void Reducer::end_plain_backward() {
  auto& s = *s_;
  if (!s.launching) {
    s.mode = State::Mode::idle;
    return;
  }
  try {
    complete(Part::early);
    complete(Part::last);
  } catch (...) {  // the others wait for the rest
    const auto error = std::current_exception();
    abort_step(is_out_of_memory(error) ? FailureKind::out_of_memory : FailureKind::error,
               describe(error));
    throw;
  }
  const auto records = finish();
  s.stands = worst(records) < Verdict::retry;
  if (s.stands) {
    accept(1.0, true);
    return;
  }
  discard();
  int first = -1;
  bool memory = false;
  std::string words;
  for (int rank = 0; rank < s.world_size; ++rank) {
    if (records[rank].verdict < Verdict::retry) {
      continue;
    }
    const auto text = read_failure(rank, kTextPatience);
    if (first < 0) {
      first = rank;
      memory =
          records[rank].verdict == Verdict::failed_memory || text.rfind("out of memory", 0) == 0;
    }
    words += (words.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + text;
  }
  detail::throw_rank_failed(first, s.step - 1,
                            memory ? FailureKind::out_of_memory : FailureKind::error,
                            "step " + std::to_string(s.step - 1) + " failed on " + words);
}

void Reducer::plain_backward_died() noexcept {
  auto& s = *s_;
  try {
    if (s.mode != State::Mode::plain) {
      return;
    }
    if (!s.launching) {
      s.mode = State::Mode::idle;
    } else if (s.in_scope) {
      s.died = true;
    } else {
      // The error is not known here, but a refused allocation is evidence enough for its kind.
      const bool memory = memory::stats(s.device).ooms > s.ooms_before;
      abort_step(memory ? FailureKind::out_of_memory : FailureKind::error,
                 memory ? "an allocation was refused in backward" : "");
    }
  } catch (const std::exception& e) {
    log(LogLevel::error, std::string("could not announce the failure of this rank: ") + e.what());
  }
}

void Reducer::abort_step(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  if (!text.empty()) {
    publish_failure(kind, text);
  }
  s.record = {};
  s.record.verdict = kind == FailureKind::out_of_memory ? Verdict::failed_memory : Verdict::failed;
  s.loss_sum.reset();
  s.forward_open = false;
  s.aborted = true;
  s.died = false;
  s.untold.reset();
  drain(Part::early);
  drain(Part::last);
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.mode = State::Mode::idle;
  s.launching = false;
}

void Reducer::settle() {
  auto& s = *s_;
  if (!s.aborted) {
    return;
  }
  publish_failure(FailureKind::error, kUnknown);  // kept only where no words were left yet
  s.aborted = false;
  finish();
  discard();
}

void Reducer::begin_scope() {
  settle();
  s_->in_scope = true;
  s_->scope_step = s_->step;
}

void Reducer::end_scope_ok() {
  s_->in_scope = false;
  if (s_->died) {
    abort_step(FailureKind::error, kUnknown);  // its error was swallowed inside the scope
  }
}

void Reducer::leave_word(FailureKind kind, const std::string& text) {
  publish_failure(kind, text);
}

void Reducer::end_scope_failed(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  s.in_scope = false;
  if (s.scope_step ==
      s.step) {  // no collective of this step has ended: the other ranks wait for it
    announce_failure(kind, text, 0);
  } else if (s.stands) {
    s.untold = {kind, text};
  }
}

void Reducer::announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) {
  auto& s = *s_;
  if (s.aborted) {
    publish_failure(kind, text);
  } else {
    abort_step(kind, text);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  const auto done = [&] {
    return std::all_of(s.buckets.begin(), s.buckets.end(),
                       [](const auto& b) { return !b.work || b.work->isCompleted(); });
  };
  while (!done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Reducer::owes() const {
  return s_->aborted || s_->forward_open || (s_->mode == State::Mode::plain && s_->launching);
}

void Reducer::set_sync(bool sync) {
  s_->sync = sync;
}

bool Reducer::sync() const {
  return s_->sync;
}

}  // namespace brimful
