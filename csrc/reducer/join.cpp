// Uneven data in a plain loop: a rank without more data makes the calls of the others' steps.
#include <algorithm>
#include <utility>

#include "reducer/group_calls.h"
#include "reducer/reducer_state.h"

namespace brimful {
namespace {
[[noreturn]] void throw_ended(int64_t with_data, int world_size) {
  TORCH_CHECK(false, "data ended on some ranks (ranks that have more: ", with_data, " of ",
              world_size, "; throw_on_early_termination: true)");
}
}  // namespace

void Reducer::begin_join(bool mean_of_active, bool throw_early) {
  s_->mean_of_active = mean_of_active;
  s_->throw_early = throw_early;
  s_->joining = true;
  s_->active.clear();
}

void Reducer::end_join() {
  begin_join(false, false);
  s_->joining = false;
  if (s_->updates) {
    s_->updates->forget();  // all ranks get the parameters of one
  }
}

// Not an all_reduce, for the reason in agree.cpp.
std::vector<uint8_t> Reducer::ask_all(uint8_t own, const std::string& what) {
  auto& s = *s_;
  exchange_in_turn();
  ++s.counters.exchanges;
  s.waiting_since = std::chrono::steady_clock::now();
  std::vector<uint8_t> answers;
  try {
    for (const auto& bytes : exchange_bytes(s.group, s.device, {own},
                                            [&](c10d::Work& work) { wait_for(work, s.device); })) {
      answers.push_back(bytes[0]);
    }
  } catch (const std::exception& e) {
    s.broken = std::current_exception();
    s.forward_open = false;
    throw_broken(s.step, what, e.what());
  }
  return answers;
}

void Reducer::require_data() {
  require_all(true);
}

bool Reducer::any_rank(bool own) {
  const auto answers = ask_all(own ? 1 : 0, "a step within a join");
  return std::any_of(answers.begin(), answers.end(), [](auto answer) { return answer != 0; });
}

void Reducer::require_all(bool has_data) {
  auto& s = *s_;
  if (!s.throw_early || s.world_size == 1 || s.mode == State::Mode::managed) {
    return;
  }
  const auto answers = ask_all(has_data ? 1 : 0, "whether all ranks have data");
  const auto with_data = std::count(answers.begin(), answers.end(), uint8_t{1});
  if (with_data > 0 && with_data < s.world_size) {
    call_off();
    throw_ended(with_data, s.world_size);
  }
}

void Reducer::call_off() {
  s_->forward_open = false;
  s_->called_off = s_->in_scope;
}

// A rank that has left comes to the next step at once, while the others may be in a forward that makes collectives of its
// own: over gloo a bucket that meets one of those ends the process. A barrier has no size to differ, and waits beside
// backward. Where ranks ask before each forward, none is in one alone.
void Reducer::meet_behind_forward() {
  auto& s = *s_;
  if (!s.joining || s.throw_early || s.world_size == 1 || !s.device.is_cpu() || s.broken) {
    return;
  }
  ++s.counters.exchanges;
  const WithoutPythonObjects without;
  c10d::BarrierOptions options;
  options.device = s.device;
  try {
    s.met = s.group->barrier(options);
  } catch (...) {
    s.broken = std::current_exception();
  }
}

bool Reducer::join_step(bool keep_gradients) {
  auto& s = *s_;
  require_not_taken();
  settle();
  require_all(false);
  take_up_plan();
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (keep_gradients) {
      discard();
      s.mode = State::Mode::plain;
    }
    begin_plain_step(Status::no_data);
    start_backward(keep_gradients);
  }
  s.waiting_since = std::chrono::steady_clock::now();
  if (s.met) {
    try {
      wait_for(*s.met, s.device);
    } catch (...) {
      s.broken = std::current_exception();
    }
  }
  if (keep_gradients) {
    end_plain_backward();
  } else {
    join_without_gradients();
  }
  const auto& records = s.tail->records();
  return std::any_of(records.begin(), records.end(),
                     [](const auto& record) { return record.verdict == Status::ok; });
}

void Reducer::join_without_gradients() {
  auto& s = *s_;
  launch_early(Fill::zeros);
  if (close_turn()) {
    launch_last(Fill::zeros, s.said);
  }
  const auto ending = finish();
  require_success(ending);
  exchange_rows();  // the others wait for this rank, which has none
  discard();
  if (!std::exchange(s.keep_buffers, false)) {
    s.tail->write_back_buffers();
  }
  s.hear_of_plan(ending.records[0].plan);
  s.propose_plan();
}

void Reducer::note_data(const std::vector<ControlRecord>& records) {
  auto& s = *s_;
  std::vector<int> active;
  for (int rank = 0; rank < s.world_size; ++rank) {
    if (records[rank].verdict == Status::ok) {
      active.push_back(rank);
    }
  }
  const auto with_data = static_cast<int>(active.size());
  if (s.throw_early && with_data > 0 && with_data < s.world_size) {
    discard();
    call_off();
    s.stands = false;
    throw_ended(with_data, s.world_size);
  }
  s.keep_buffers = records[s.buffer_source].verdict == Status::no_data;
  if (with_data > 0) {
    s.active = std::move(active);
  }
}

const std::vector<int>& Reducer::active() const {
  return s_->active;
}

bool Reducer::replace_buffer(const at::Tensor& before, const at::Tensor& now) {
  return s_->tail->replace(before, now);
}

void Reducer::broadcast(const std::vector<at::Tensor>& tensors, int source) {
  broadcast_from(source, s_->group, tensors);
}

}  // namespace brimful
