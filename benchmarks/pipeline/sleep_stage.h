#pragma once
// Stages that take time and no processor, so that eight of them run side by side on two cores.
#include <ATen/ATen.h>
#include <brimful/pipeline/stage.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <chrono>
#include <memory>

#include "alarm.h"

namespace bench {

/// By the current alarm, which wakes within some 30 us: it spins through the rest.
inline void sleep_for(double seconds) {
  constexpr auto kWakeUp = std::chrono::microseconds(50);
  const std::chrono::duration<double> length(seconds);
  const auto end = Alarm::Clock::now() + std::chrono::duration_cast<Alarm::Clock::duration>(length);
  Alarm::current().sleep_until(end - kWakeUp);
  while (Alarm::Clock::now() < end) {
  }
}

struct Seconds {
  double forward = 0;
  double input = 0;
  double weight = 0;
};

/// Activations that are held now, and the most that were.
struct Live {
  static constexpr int64_t kBytes = 4096;  ///< of one
  std::atomic<int> now{0};
  std::atomic<int> peak{0};

  /// Memory that counts itself.
  at::Tensor activation() {
    const int live = ++now;
    int most = peak.load();
    while (live > most && !peak.compare_exchange_weak(most, live)) {
    }
    auto* bytes = new char[kBytes]();
    return at::from_blob(
        bytes, {kBytes},
        [this, bytes](void*) {
          delete[] bytes;
          --now;
        },
        at::kByte);
  }
};

/// The identity; its backward sleeps, and gives what its forward has saved free.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& saved, double seconds) {
    context->save_for_backward({saved});
    context->saved_data["seconds"] = seconds;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    sleep_for(context->saved_data["seconds"].toDouble());
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

/// y = x + w; the gradient of x takes `seconds->input`, that of w `seconds->weight`, and w's side holds the activation.
inline brimful::pipeline::Stage sleep_stage(const std::shared_ptr<const Seconds>& seconds,
                                            const std::shared_ptr<Live>& live) {
  const auto weight = at::zeros({1}).set_requires_grad(true);
  const auto nothing = at::empty({0}, at::kByte);
  const auto forward = [=](const at::Tensor& x) {
    sleep_for(seconds->forward);
    // The first stage's input needs no gradient: there all of the backward is the weight's.
    const double own = x.requires_grad() ? seconds->weight : seconds->weight + seconds->input;
    const auto from_weight = Sleep::apply(weight, live->activation(), own);
    const auto from_input =
        x.requires_grad() ? Sleep::apply(x, nothing, seconds->input) : at::Tensor(x);
    return at::Tensor(from_input + from_weight);
  };
  return brimful::pipeline::make_stage(forward, {weight});
}

}  // namespace bench
