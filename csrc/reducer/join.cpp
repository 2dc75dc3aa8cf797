// Uneven data in a plain loop: a rank without more data makes the calls of the others' steps.
#include <algorithm>
#include <utility>

#include "reducer/group_calls.h"
#include "reducer/loop_driver.h"

namespace brimful {
namespace {
[[noreturn]] void throw_ended(int64_t with_data, int world_size) {
  TORCH_CHECK(false, "data ended on some ranks (ranks that have more: ", with_data, " of ",
              world_size, "; throw_on_early_termination: true); end the epoch on this rank too");
}
}  // namespace

void LoopDriver::begin_join(bool mean_of_active, bool throw_early) {
  join_.mean_of_active = mean_of_active;
  join_.throw_early = throw_early;
  s_.attempt.uneven = true;
  join_.active.clear();
}

void LoopDriver::end_join() {
  begin_join(false, false);
  s_.attempt.uneven = false;
  if (s_.updates) {
    s_.updates->forget();  // all ranks get the parameters of one
  }
}

// Not an all_reduce, for the reason in agree.cpp.
std::vector<uint8_t> LoopDriver::ask_all(uint8_t own, const std::string& what) {
  engine_.exchange_in_turn();
  ++s_.counters.exchanges;
  s_.link.waiting_since = std::chrono::steady_clock::now();
  std::vector<uint8_t> answers;
  try {
    for (const auto& bytes :
         exchange_bytes(s_.link.group, s_.link.device, {own},
                        [&](c10d::Work& work) { s_.link.wait_for(work, s_.link.device); })) {
      answers.push_back(bytes[0]);
    }
  } catch (const std::exception& e) {
    s_.link.broken = std::current_exception();
    forward_.open = false;
    s_.link.throw_broken(s_.attempt.step, what, e.what());
  }
  return answers;
}

bool LoopDriver::any_rank(bool own) {
  const auto answers = ask_all(own ? 1 : 0, "a step within a join");
  return std::any_of(answers.begin(), answers.end(), [](auto answer) { return answer != 0; });
}

void LoopDriver::require_all(bool has_data) {
  if (!join_.throw_early || s_.link.world_size == 1 || s_.attempt.mode == Mode::managed) {
    return;
  }
  const auto answers = ask_all(has_data ? 1 : 0, "whether all ranks have data");
  const auto with_data = std::count(answers.begin(), answers.end(), uint8_t{1});
  if (with_data > 0 && with_data < s_.link.world_size) {
    call_off();
    throw_ended(with_data, s_.link.world_size);
  }
}

void LoopDriver::call_off() {
  forward_.open = false;
  scope_.called_off = scope_.open;
}

// A rank that has left comes to the next step at once, while the others may be in a forward that makes collectives of its
// own: over gloo a bucket that meets one of those ends the process. A barrier has no size to differ, and waits beside
// backward. Where ranks ask before each forward, none is in one alone.
void LoopDriver::meet_behind_forward() {
  if (!s_.attempt.uneven || join_.throw_early || s_.link.world_size == 1 ||
      !s_.link.device.is_cpu() || s_.link.broken) {
    return;
  }
  ++s_.counters.exchanges;
  const WithoutPythonObjects without;
  c10d::BarrierOptions options;
  options.device = s_.link.device;
  s_.link.call([&] { join_.met = s_.link.group->barrier(options); });
}

bool LoopDriver::join_step(bool keep_gradients) {
  require_not_taken();
  settle();
  require_all(false);
  engine_.take_up_plan();
  {
    const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
    if (keep_gradients) {
      engine_.discard();
      s_.attempt.mode = Mode::plain;
    }
    begin_plain_step(Status::no_data);
    engine_.start_backward(keep_gradients);
  }
  s_.link.waiting_since = std::chrono::steady_clock::now();
  if (join_.met) {
    s_.link.call([&] { s_.link.wait_for(*join_.met, s_.link.device); });
  }
  if (keep_gradients) {
    end_plain_backward();
  } else {
    join_without_gradients();
  }
  const auto& records = s_.layout.tail->records();
  return std::any_of(records.begin(), records.end(),
                     [](const auto& record) { return record.verdict == Status::ok; });
}

void LoopDriver::join_without_gradients() {
  engine_.launch_early(Fill::zeros);
  if (close_turn()) {
    engine_.launch_last(Fill::zeros, step_.said);
  }
  require_success(finish_step());
  engine_.accept_nothing();
}

void LoopDriver::note_data(const std::vector<ControlRecord>& records) {
  std::vector<int> active;
  for (int rank = 0; rank < s_.link.world_size; ++rank) {
    if (records[rank].verdict == Status::ok) {
      active.push_back(rank);
    }
  }
  const auto with_data = static_cast<int>(active.size());
  if (join_.throw_early && with_data > 0 && with_data < s_.link.world_size) {
    engine_.discard();
    call_off();
    step_.stands = false;
    throw_ended(with_data, s_.link.world_size);
  }
  if (with_data > 0) {
    join_.active = std::move(active);
  }
}

}  // namespace brimful
