// A stage's backward of a microbatch, whole or in two parts.
#include <ATen/ATen.h>
#include <brimful/ladder/checkpoint_call.h>

#include "pipeline/executor/rank_run.h"

namespace brimful::pipeline {

std::vector<at::Tensor> RankRun::output_gradients(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  if (stage.output_gradients == nullptr) {
    require_wanted();
    const auto& loss = flight.outputs[0];
    if (!loss.defined()) {
      return {at::Tensor()};
    }
    auto seed =
        at::full_like(loss, *flight.weight / work_.ref, at::TensorOptions().requires_grad(false));
    return {work_.seed ? work_.seed(seed) : seed};
  }
  auto message = take(*stage.output_gradients, stage.outputs_apart,
                      stage.received_gradients[microbatch], microbatch);
  return std::move(message.value.tensors);
}

RankRun::Roots RankRun::roots_of(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  const auto gradients = output_gradients(stage, microbatch);
  for (size_t i = 0; i < flight.went.size(); ++i) {
    skips_.put_gradient(flight.went[i], microbatch, gradients[flight.outputs.size() + i]);
  }
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
  for (const auto& [name, tensor] : flight.skips.stashed) {
    add(tensor, skips_.take_gradient(name, microbatch, stage.device));
  }
  return roots;
}

// A recomputed stage would run its forward in both parts, or hold all gradients of its weights between them; an offloaded one
// those of what it computes, in the memory that it gave up.
std::vector<at::Tensor> RankRun::gradients_of_leaves(StageRun& stage, InFlight& flight,
                                                     const Roots& roots,
                                                     const std::vector<at::Tensor>& leaves,
                                                     bool input_only) {
  const bool holds_less = stage.again.rung != StageRung::none;
  if (roots.outputs.empty()) {
    return std::vector<at::Tensor>(leaves.size());
  }
  if (input_only && stage.splits && !holds_less) {
    auto split = backward_input(roots.outputs, roots.gradients, leaves);
    flight.weight_work = std::move(split.weight_work);
    stage.learn_split(split);
    return std::move(split.input_gradients);
  }
  stage.again.joined_parts |= input_only && holds_less;
  try {
    return backward_full(roots.outputs, roots.gradients, leaves);
  } catch (const CannotRunAgain& refused) {
    stage.again.refusal = is_recomputed(stage.again.rung) ? refused.what_without_backtrace() : "";
    throw;
  }
}

void RankRun::backward(StageRun& stage, int microbatch, bool input_only) {
  auto& flight = stage.flights[microbatch];
  const SkipScope skips(skips_, flight.skips, microbatch, stage.device);
  const auto roots = roots_of(stage, microbatch);
  const Turns::Turn turn(turns_, rank_, stage.index, DrawPart::backward, microbatch);
  std::vector<at::Tensor> leaves;
  std::vector<size_t> places;  // of the first leaves among the inputs
  for (size_t i = 0; stage.inputs != nullptr && i < flight.inputs.size(); ++i) {
    if (flight.inputs[i].defined() && flight.inputs[i].requires_grad()) {
      places.push_back(i);
      leaves.push_back(flight.inputs[i]);
    }
  }
  for (const auto& [name, tensor] : flight.skips.popped) {
    leaves.push_back(tensor);
  }
  const auto first_callers = leaves.size();
  for (const auto& [tensor, leaf] : flight.caller_leaves) {
    leaves.push_back(leaf);
  }
  auto of_leaves = gradients_of_leaves(stage, flight, roots, leaves, input_only);
  std::vector<at::Tensor> of_inputs(flight.inputs.size());
  for (size_t i = 0; i < places.size(); ++i) {
    of_inputs[places[i]] = std::move(of_leaves[i]);
  }
  for (size_t i = 0; i < flight.skips.popped.size(); ++i) {
    skips_.put_gradient(flight.skips.popped[i].name, microbatch,
                        std::move(of_leaves[places.size() + i]));
  }
  for (size_t i = 0; i < flight.caller_leaves.size(); ++i) {
    add_gradient(stage.caller_gradients, flight.caller_leaves[i].tensor,
                 of_leaves[first_callers + i]);
  }
  for (const auto& name : flight.came) {
    of_inputs.push_back(skips_.take_gradient(name, microbatch, stage.device));
  }
  // Before this stage lets go of its graph: the next rank waits for them.
  send_gradients(stage, microbatch, std::move(of_inputs));
  if (input_only) {
    flight.phase = Phase::inputs_done;
    flight.drop_inputs();
    flight.outputs.clear();
    flight.skips.drop_graph();
    if (flight.weight_work.empty()) {
      flight.skips.again.clear();
    }
    flight.caller_leaves.clear();
  } else {
    stage.end_flight(flight);
  }
}

void RankRun::send_gradients(StageRun& stage, int microbatch, std::vector<at::Tensor> gradients) {
  if (stage.input_gradients == nullptr) {
    return;
  }
  Message message;
  message.value.tensors = std::move(gradients);
  if (stage.inputs_apart) {
    stage.waiting_gradients[microbatch] = std::move(message);
  } else {
    stage.input_gradients->send(microbatch, std::move(message));
  }
}

void RankRun::backward_weight(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  const Turns::Turn turn(turns_, rank_, stage.index, DrawPart::weight, microbatch);
  if (!flight.weight_work.empty()) {
    const SkipScope skips(skips_, flight.skips, microbatch, stage.device);
    flight.weight_work.run();
  }
  stage.end_flight(flight);
}

}  // namespace brimful::pipeline
