// What each action does. A stage's graph begins at its inputs and ends at its outputs: what moves on is cut off.
#include "pipeline/rank_run.h"

#include <ATen/ATen.h>

#include <chrono>

namespace brimful::pipeline {
namespace {
using Clock = std::chrono::steady_clock;

void begin_flight(StageRun& stage, InFlight& flight) {
  flight.live = true;
  stage.peak_live = std::max(stage.peak_live, ++stage.live);
}

void end_flight(StageRun& stage, InFlight& flight) {
  stage.live -= flight.live ? 1 : 0;
  flight = {};
}

void require_known_parameters(StageRun& stage, const InFlight& flight) {
  if (stage.known_parameters.done()) {
    return;
  }
  std::vector<at::Tensor> outputs = flight.outputs;
  std::vector<at::Tensor> popped;
  for (const auto& [name, tensor] : flight.stashed) {
    outputs.push_back(tensor);
  }
  for (const auto& [name, tensor] : flight.popped) {
    popped.push_back(tensor);
  }
  const auto& given = stage.stage->parameters;
  stage.known_parameters.check(outputs, {&given, &flight.inputs, &popped}, stage.index);
}

/// The host does not wait, but where it reads the copy itself.
at::Tensor moved(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    result.push_back(tensor.defined() ? tensor.detach() : tensor);
  }
  return result;
}
}  // namespace

void StageRun::drop() {
  flights.clear();
  waiting_outputs.clear();
  waiting_gradients.clear();
  received.clear();
  received_gradients.clear();
}

void RankRun::run(StageRun& stage, const Action& action) {
  waited_ns_ = 0;
  const auto microbatch = action.microbatch;
  switch (action.kind) {
    case ActionKind::forward:
      return forward(stage, microbatch);
    case ActionKind::backward:
      return backward(stage, microbatch, false);
    case ActionKind::backward_input:
      return backward(stage, microbatch, true);
    case ActionKind::backward_weight:
      return backward_weight(stage, microbatch);
    case ActionKind::send_forward:
      return stage.outputs->send(microbatch, std::move(stage.waiting_outputs[microbatch]));
    case ActionKind::send_backward:
      return stage.input_gradients->send(microbatch,
                                         std::move(stage.waiting_gradients[microbatch]));
    case ActionKind::receive_forward:
      stage.received[microbatch] = receive(*stage.inputs, nullptr, microbatch);
      return;
    case ActionKind::receive_backward:
      stage.received_gradients[microbatch] = receive(*stage.output_gradients, nullptr, microbatch);
      return;
  }
}

void RankRun::make_up(StageRun& stage, const Action& action) {
  const auto microbatch = action.microbatch;
  // A peer that is gone does not matter: others wait all the same.
  const auto discard = [&](Channel* channel) {
    try {
      if (channel != nullptr) {
        channel->discard(microbatch);
      }
    } catch (const std::exception&) {
    }
  };
  const auto send_failure = [&](Channel* channel) {
    try {
      if (channel != nullptr) {
        channel->send_failure(microbatch);
      }
    } catch (const std::exception&) {
    }
  };
  switch (action.kind) {
    case ActionKind::forward:
      discard(stage.inputs);
      return send_failure(stage.outputs);
    case ActionKind::backward:
    case ActionKind::backward_input:
      discard(stage.output_gradients);
      return send_failure(stage.input_gradients);
    case ActionKind::send_forward:  // its forward may be behind it
      return send_failure(stage.outputs);
    case ActionKind::send_backward:
      return send_failure(stage.input_gradients);
    default:  // receives are made up for where their message is used
      return;
  }
}

Message RankRun::receive(Channel& channel, std::optional<Message>* received, int microbatch) {
  if (received != nullptr && received->has_value()) {
    auto message = std::move(**received);
    received->reset();
    return message;
  }
  const auto began = Clock::now();
  auto message = channel.receive(microbatch);
  waited_ns_ = std::chrono::nanoseconds(Clock::now() - began).count();
  return message;
}

void RankRun::forward(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  Value input;
  if (stage.inputs == nullptr) {
    input = work_.input(microbatch);
    for (auto& tensor : input.tensors) {
      if (tensor.defined()) {  // no gradient leaves the first stage
        tensor = tensor.requires_grad() ? tensor.detach() : tensor;
        tensor = moved(tensor, stage.device);
      }
    }
    flight.inputs = input.tensors;
  } else {
    auto message = receive(*stage.inputs, &stage.received[microbatch], microbatch);
    input = std::move(message.value);
    for (size_t i = 0; i < input.tensors.size(); ++i) {
      auto& tensor = input.tensors[i];
      if (tensor.defined() && tensor.device() != stage.device) {
        tensor = moved(tensor, stage.device);
      }
      if (message.needs_gradient[i] != 0) {
        tensor.set_requires_grad(true);
      }
    }
    flight.inputs = input.tensors;
  }
  SkipScope skips(skips_, microbatch, stage.device);
  auto output = stage.stage->forward(input);
  flight.stashed = std::move(skips.stashed);
  flight.popped = std::move(skips.popped);
  if (stage.outputs == nullptr) {
    finish_loss(stage, microbatch, output);
  } else {
    keep_outputs(stage, microbatch, std::move(output));
  }
  if (work_.loss) {
    require_known_parameters(stage, flight);
    begin_flight(stage, flight);
  } else {
    flight = {};
  }
}

void RankRun::finish_loss(StageRun& stage, int microbatch, const Value& output) {
  if (!work_.loss) {
    result_.outputs[microbatch] = output;
    return;
  }
  auto& flight = stage.flights[microbatch];
  auto piece = work_.loss(microbatch, output);
  require_loss(piece);
  result_.losses[microbatch] = {piece.loss.detach(), piece.weight};
  flight.weight = piece.weight;
  flight.outputs.assign(1, piece.weight > 0 ? std::move(piece.loss) : at::Tensor());
}

void RankRun::keep_outputs(StageRun& stage, int microbatch, Value output) {
  auto& flight = stage.flights[microbatch];
  Message message;
  message.needs_gradient.reserve(output.tensors.size());
  flight.outputs.clear();
  for (const auto& tensor : output.tensors) {
    const bool needs = tensor.defined() && tensor.requires_grad();
    message.needs_gradient.push_back(needs ? 1 : 0);
    flight.outputs.push_back(needs ? tensor : at::Tensor());
  }
  message.value.tensors = detached(output.tensors);
  message.value.form = std::move(output.form);
  if (stage.outputs_apart) {
    stage.waiting_outputs[microbatch] = std::move(message);
  } else {
    stage.outputs->send(microbatch, std::move(message));
  }
}

std::vector<at::Tensor> RankRun::output_gradients(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  if (stage.output_gradients == nullptr) {
    const auto& loss = flight.outputs[0];
    if (!loss.defined()) {
      return {at::Tensor()};
    }
    auto seed =
        at::full_like(loss, *flight.weight / work_.ref, at::TensorOptions().requires_grad(false));
    return {work_.seed ? work_.seed(seed) : seed};
  }
  auto message =
      receive(*stage.output_gradients, &stage.received_gradients[microbatch], microbatch);
  return std::move(message.value.tensors);
}

RankRun::Roots RankRun::roots_of(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  const auto gradients = output_gradients(stage, microbatch);
  Roots roots;
  const auto add = [&](const at::Tensor& output, const at::Tensor& gradient) {
    if (output.defined() && gradient.defined()) {
      roots.outputs.push_back(output);
      roots.gradients.push_back(
          gradient.device() == output.device() ? gradient : moved(gradient, output.device()));
    }
  };
  for (size_t i = 0; i < flight.outputs.size(); ++i) {
    add(flight.outputs[i], gradients[i]);
  }
  for (const auto& [name, tensor] : flight.stashed) {
    add(tensor, skips_.take_gradient(name, microbatch));
  }
  return roots;
}

void RankRun::backward(StageRun& stage, int microbatch, bool input_only) {
  auto& flight = stage.flights[microbatch];
  const auto roots = roots_of(stage, microbatch);
  std::vector<at::Tensor> leaves;
  std::vector<size_t> places;  // of the first leaves among the inputs
  for (size_t i = 0; stage.inputs != nullptr && i < flight.inputs.size(); ++i) {
    if (flight.inputs[i].defined() && flight.inputs[i].requires_grad()) {
      places.push_back(i);
      leaves.push_back(flight.inputs[i]);
    }
  }
  for (const auto& [name, tensor] : flight.popped) {
    leaves.push_back(tensor);
  }
  std::vector<at::Tensor> of_leaves(leaves.size());
  if (!roots.outputs.empty() && input_only) {
    auto split = backward_input(roots.outputs, roots.gradients, leaves);
    of_leaves = std::move(split.input_gradients);
    flight.weight_work = std::move(split.weight_work);
  } else if (!roots.outputs.empty()) {
    of_leaves = backward_full(roots.outputs, roots.gradients, leaves);
  }
  std::vector<at::Tensor> of_inputs(flight.inputs.size());
  for (size_t i = 0; i < places.size(); ++i) {
    of_inputs[places[i]] = std::move(of_leaves[i]);
  }
  for (size_t i = 0; i < flight.popped.size(); ++i) {
    skips_.put_gradient(flight.popped[i].name, microbatch, std::move(of_leaves[places.size() + i]));
  }
  if (input_only) {
    flight.inputs.clear();
    flight.outputs.clear();
    flight.stashed.clear();
    flight.popped.clear();
  } else {
    end_flight(stage, flight);
  }
  send_gradients(stage, microbatch, std::move(of_inputs));
}

void RankRun::send_gradients(StageRun& stage, int microbatch, std::vector<at::Tensor> gradients) {
  if (stage.input_gradients == nullptr) {
    return;
  }
  Message message{{std::move(gradients), nullptr}, {}};
  if (stage.gradients_apart) {
    stage.waiting_gradients[microbatch] = std::move(message);
  } else {
    stage.input_gradients->send(microbatch, std::move(message));
  }
}

void RankRun::backward_weight(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  if (!flight.weight_work.empty()) {
    flight.weight_work.run();
  }
  end_flight(stage, flight);
}

}  // namespace brimful::pipeline
