#include "reducer/arrivals.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace brimful {

void Arrivals::begin_step(bool managed) {
  came_late_ = false;
  reentrant_ = reentrant_ && !managed;
}

void Arrivals::begin_backward() {
  parts_.placement.begin_backward();
  parts_.watch.begin_backward(parts_.layout.buckets.size());
  parts_.tuner.begin_backward();
}

void Arrivals::watch(const at::Tensor& loss, std::weak_ptr<Arrivals> self) {
  loss.register_hook([weak = std::move(self)](const at::Tensor&) {
    if (const auto arrivals = weak.lock()) {
      arrivals->graph_task_ = torch::autograd::get_current_graph_task_id();
    }
  });
}

bool Arrivals::take(int64_t parameter, const at::Tensor& gradient) {
  const auto index = parts_.layout.slots[parameter].bucket;
  auto& bucket = parts_.layout.buckets[index];
  if (bucket.launched) {
    throw_late(parameter);
  }
  reentrant_ = reentrant_ || (parts_.attempt.is_managed() &&
                              torch::autograd::get_current_graph_task_id() != graph_task_);
  const auto began = parts_.watch.gradient(index);
  parts_.tuner.note_gradient(parameter);
  bucket.join_current_stream();
  if (parts_.placement.has_come(parameter)) {
    parts_.placement.add_again(parameter, gradient);
    return false;
  }
  const bool is_full = parts_.placement.place_next(parameter, gradient);
  parts_.watch.end_copy(began);
  if (is_full) {
    parts_.watch.ready(index);
  }
  return is_full;
}

void Arrivals::throw_late(int64_t parameter) {
  came_late_ = true;
  launch_late_ = true;
  TORCH_CHECK(false, "a parameter got a second gradient after its bucket was launched (parameter: ",
              parts_.layout.name_of(parameter),
              "); a module used several times under reentrant checkpointing does that. From now on "
              "buckets are launched after backward: "
              "repeat the step (a BatchSizer does so by itself), or pass use_reentrant=False to "
              "checkpoint");
}

}  // namespace brimful
