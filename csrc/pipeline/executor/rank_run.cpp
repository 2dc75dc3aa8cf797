// What each action does. A stage's graph begins at its inputs and ends at its outputs: what moves on is cut off.
#include "pipeline/executor/rank_run.h"

#include <ATen/ATen.h>
#include <brimful/pipeline/schedule_text.h>

#include <chrono>

#include "memory/left_bytes.h"
#include "pipeline/executor/keyword_scope.h"
#include "pipeline/schedule/messages.h"

namespace brimful::pipeline {
namespace {
using Clock = std::chrono::steady_clock;

void begin_flight(StageRun& stage, InFlight& flight) {
  flight.phase = Phase::forwarded;
  flight.live = true;
  stage.peak_live = std::max(stage.peak_live, ++stage.live);
}

void end_flight(StageRun& stage, InFlight& flight) {
  stage.live -= flight.live ? 1 : 0;
  stage.live_bytes -= flight.bytes;
  flight.drop_inputs();
  auto shapes = std::move(flight.shapes);
  flight = {};
  flight.phase = Phase::done;
  flight.shapes = std::move(shapes);
}

void require_turn(bool is_due, const Action& action) {
  TORCH_CHECK_VALUE(is_due,
                    "the schedule has an action too early, or twice (action: ", to_text(action),
                    "); check() says what is wrong with it");
}

void require_known_parameters(StageRun& stage, const InFlight& flight) {
  if (stage.known_parameters.done()) {
    return;
  }
  std::vector<at::Tensor> outputs = flight.outputs;
  std::vector<at::Tensor> popped;
  for (const auto& [name, tensor] : flight.skips.stashed) {
    outputs.push_back(tensor);
  }
  for (const auto& [name, tensor] : flight.skips.popped) {
    popped.push_back(tensor);
  }
  for (const auto& [tensor, leaf] : flight.caller_leaves) {
    popped.push_back(leaf);
  }
  const auto& given = stage.stage->parameters;
  stage.known_parameters.check(outputs, {&given, &flight.inputs, &popped}, stage.index);
}

/// The result of mse_loss and others is a number in memory as large as what was summed.
at::Tensor alone(const at::Tensor& loss) {
  const auto cut = loss.detach();
  return cut.has_storage() && cut.storage().nbytes() > cut.nbytes() ? cut.clone() : cut;
}

Message taken(std::optional<Message>& place) {
  auto message = std::move(*place);
  place.reset();
  return message;
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    result.push_back(tensor.defined() ? tensor.detach() : tensor);
  }
  return result;
}
/// What came past the stage before goes on, or is popped here.
void take_stashed(SkipBoard& skips, InFlight& flight, Message& message, int microbatch) {
  auto& tensors = message.value.tensors;
  const auto own = tensors.size() - message.stashed.size();
  for (size_t i = 0; i < message.stashed.size(); ++i) {
    skips.put(message.stashed[i], microbatch,
              {left_at(std::move(tensors[own + i])), message.needs_gradient[own + i] != 0});
  }
  tensors.resize(own);
  message.needs_gradient.resize(own);
  flight.came = std::move(message.stashed);
}

void add_stashed(SkipBoard& skips, InFlight& flight, Message& message, int microbatch,
                 c10::Device device) {
  for (auto& [name, parcel] : skips.take_all(microbatch)) {
    message.value.tensors.push_back(skips.lanes().fetch(std::move(parcel.message), device));
    message.needs_gradient.push_back(parcel.needs_gradient ? 1 : 0);
    message.stashed.push_back(name);
  }
  flight.went = message.stashed;
}
}  // namespace

void RankRun::run(StageRun& stage, const Action& action) {
  waited_ns_ = 0;
  const bool is_backward =
      gives_input_gradients(action.kind) || action.kind == ActionKind::backward_weight;
  if (is_backward && work_.before_backward) {
    work_.before_backward(action);
  }
  perform(stage, action);
  if (is_backward && work_.after_backward) {
    require_wanted();
    work_.after_backward(action);
  }
}

void RankRun::perform(StageRun& stage, const Action& action) {
  const bool counts = counts_bytes_ && (action.kind == ActionKind::forward ||
                                        action.kind == ActionKind::backward_input);
  if (!counts) {
    return act(stage, action);
  }
  const memory::LeftBytes left(stage.device);
  act(stage, action);
  stage.hold(stage.flights[action.microbatch], left.bytes());
}

void RankRun::act(StageRun& stage, const Action& action) {
  const auto microbatch = action.microbatch;
  const auto phase = stage.flights[microbatch].phase;
  if (microbatch >= work_.filled && is_compute(action.kind)) {
    return pass_by(stage, action);
  }
  switch (action.kind) {
    case ActionKind::forward:
      require_turn(phase == Phase::due, action);
      return forward(stage, microbatch);
    case ActionKind::backward:
    case ActionKind::backward_input:
      require_turn(phase == Phase::forwarded, action);
      return backward(stage, microbatch, action.kind == ActionKind::backward_input);
    case ActionKind::backward_weight:
      require_turn(phase == Phase::inputs_done, action);
      return backward_weight(stage, microbatch);
    case ActionKind::send_forward:
      require_turn(stage.waiting_outputs[microbatch].has_value(), action);
      stage.outputs->send(microbatch, taken(stage.waiting_outputs[microbatch]));
      return;
    case ActionKind::send_backward:
      require_turn(stage.waiting_gradients[microbatch].has_value(), action);
      stage.input_gradients->send(microbatch, taken(stage.waiting_gradients[microbatch]));
      return;
    case ActionKind::receive_forward:
      require_turn(stage.inputs_apart && !stage.received[microbatch], action);
      stage.received[microbatch] = receive(*stage.inputs, microbatch);
      return;
    case ActionKind::receive_backward:
      require_turn(stage.outputs_apart && !stage.received_gradients[microbatch], action);
      stage.received_gradients[microbatch] = receive(*stage.output_gradients, microbatch);
      return;
  }
}

Message RankRun::receive(Channel& channel, int microbatch) {
  const auto began = Clock::now();
  waits_.store(true, std::memory_order_relaxed);
  auto message = channel.receive(microbatch);  // what it throws ends the rank's step
  waits_.store(false, std::memory_order_relaxed);
  waited_ns_ = std::chrono::nanoseconds(Clock::now() - began).count();
  return message;
}

Message RankRun::take(Channel& channel, bool apart, std::optional<Message>& received,
                      int microbatch) {
  TORCH_CHECK_VALUE(!apart || received.has_value(),
                    "the schedule uses a message that it has not received (microbatch: ",
                    microbatch, "); check() says what is wrong with it");
  return apart ? taken(received) : receive(channel, microbatch);
}

void RankRun::require_wanted() const {
  if (cancelled_.load(std::memory_order_acquire)) {
    throw Cancelled();
  }
}

Value RankRun::first_input(StageRun& stage, int microbatch) {
  require_wanted();
  auto input = work_.input(microbatch);
  for (auto& tensor : input.tensors) {
    if (tensor.defined()) {
      tensor = leaf_of(tensor, stage.device,
                       work_.loss ? &stage.flights[microbatch].caller_leaves : nullptr);
    }
  }
  return input;
}

void RankRun::forward(StageRun& stage, int microbatch) {
  auto& flight = stage.flights[microbatch];
  std::optional<Turns::Turn> turn;
  const auto take_turn = [&] {
    turn.emplace(turns_, rank_, stage.index, DrawPart::forward, microbatch);
  };
  Value input;
  if (stage.inputs == nullptr) {
    take_turn();
    input = first_input(stage, microbatch);
    flight.inputs = input.tensors;
  } else {
    auto message = take(*stage.inputs, stage.inputs_apart, stage.received[microbatch], microbatch);
    take_stashed(skips_, flight, message, microbatch);
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
    take_turn();
  }
  require_wanted();
  std::transform(input.tensors.begin(), input.tensors.end(), input.tensors.begin(), changeable);
  const SkipScope skips(skips_, flight.skips, microbatch, stage.device);
  const KeywordScope keywords(work_.keywords, microbatch, stage.device,
                              work_.loss ? &flight.caller_leaves : nullptr);
  auto output = stage.stage->forward(input);
  skips_.end_forward(microbatch);
  if (stage.outputs == nullptr) {
    skips_.require_empty(microbatch);
    finish_loss(stage, microbatch, output);
  } else {
    keep_outputs(stage, microbatch, std::move(output));
  }
  if (work_.loss) {
    require_known_parameters(stage, flight);
    begin_flight(stage, flight);
  } else {
    end_flight(stage, flight);
  }
}

void RankRun::finish_loss(StageRun& stage, int microbatch, const Value& output) {
  if (!work_.loss) {
    result_.outputs[microbatch] = output;
    return;
  }
  require_wanted();
  auto& flight = stage.flights[microbatch];
  auto piece = work_.loss(microbatch, output);
  require_loss(piece);
  result_.losses[microbatch] = {alone(piece.loss), piece.weight};
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
  if (stage.outputs->is_between_processes()) {
    add_stashed(skips_, flight, message, microbatch, stage.device);
  }
  send_outputs(stage, microbatch, std::move(message));
}

void RankRun::send_outputs(StageRun& stage, int microbatch, Message message) {
  if (stage.outputs_apart) {
    stage.waiting_outputs[microbatch] = std::move(message);
  } else {
    stage.outputs->send(microbatch, std::move(message));
  }
}

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
  std::vector<at::Tensor> of_leaves(leaves.size());
  if (!roots.outputs.empty() && input_only && stage.splits) {
    auto split = backward_input(roots.outputs, roots.gradients, leaves);
    of_leaves = std::move(split.input_gradients);
    flight.weight_work = std::move(split.weight_work);
    stage.learn_split(split);
  } else if (!roots.outputs.empty()) {
    of_leaves = backward_full(roots.outputs, roots.gradients, leaves);
  }
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
    flight.caller_leaves.clear();
  } else {
    end_flight(stage, flight);
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
  end_flight(stage, flight);
}

}  // namespace brimful::pipeline
