// Uneven data in a plain loop: a rank without more data makes the calls of the others' steps.
#include <algorithm>
#include <utility>

#include "reducer/reducer_state.h"

namespace brimful {

void Reducer::begin_join(bool mean_of_active, bool throw_early) {
  s_->mean_of_active = mean_of_active;
  s_->throw_early = throw_early;
  s_->active.clear();
}

void Reducer::end_join() {
  begin_join(false, false);
}

bool Reducer::join_step() {
  auto& s = *s_;
  require_not_taken();
  settle();
  take_up_plan();
  s.record = {};
  s.record.verdict = Verdict::no_data;
  s.buffer_source = s.active.empty() ? 0 : s.active.front();
  s.loss_sum.reset();
  start_backward(false);
  drain(Part::early);
  drain(Part::last);
  const auto records = finish();
  require_success(records);
  exchange_rows();  // the others wait for this rank, which has none
  discard();
  if (!std::exchange(s.keep_buffers, false)) {
    s.tail->write_back_buffers();
  }
  s.hear_of_plan(records[0].plan);
  s.propose_plan();
  return std::any_of(records.begin(), records.end(),
                     [](const auto& record) { return record.verdict == Verdict::ok; });
}

void Reducer::note_data(const std::vector<ControlRecord>& records) {
  auto& s = *s_;
  std::vector<int> active;
  for (int rank = 0; rank < s.world_size; ++rank) {
    if (records[rank].verdict == Verdict::ok) {
      active.push_back(rank);
    }
  }
  const auto with_data = static_cast<int>(active.size());
  if (s.throw_early && with_data > 0 && with_data < s.world_size) {
    discard();
    TORCH_CHECK(false, "data ended on some ranks (ranks that have more: ", with_data, " of ",
                s.world_size, "; throw_on_early_termination: true)");
  }
  s.keep_buffers = records[s.buffer_source].verdict == Verdict::no_data;
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
