// A stage's forward of a microbatch. Its graph begins at its inputs and ends at its outputs: what moves on is cut off.
#include <ATen/ATen.h>
#include <brimful/ladder/checkpoint_call.h>

#include "ladder/put_aside.h"
#include "pipeline/executor/keyword_scope.h"
#include "pipeline/executor/rank_run.h"
#include "pipeline/executor/recomputed_forward.h"

namespace brimful::pipeline {
namespace {

void require_known_parameters(StageRun& stage, const InFlight& flight) {
  if (stage.known_parameters.done()) {
    return;
  }
  std::vector<at::Tensor> outputs = flight.outputs;
  std::vector<at::Tensor> popped;
  popped.reserve(flight.skips.popped.size() + flight.caller_leaves.size());
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
  KeywordScope keywords(work_.keywords, microbatch, stage.device,
                        work_.loss ? &flight.caller_leaves : nullptr);
  auto output = run_stage(stage, microbatch, input, keywords);
  skips_.end_forward(microbatch);
  if (stage.outputs == nullptr) {
    skips_.require_empty(microbatch);
    finish_loss(stage, microbatch, output);
  } else {
    keep_outputs(stage, microbatch, std::move(output));
  }
  if (work_.loss) {
    require_known_parameters(stage, flight);
    stage.begin_flight(flight);
  } else {
    stage.end_flight(flight);
  }
}

Value RankRun::run_stage(StageRun& stage, int microbatch, const Value& input,
                         KeywordScope& keywords) {
  if (!work_.loss || stage.again.rung == StageRung::none) {
    return stage.stage->forward(input);
  }
  if (is_offloaded(stage.again.rung)) {
    const auto aside = std::make_shared<ladder::Aside>(stage.device);
    aside->keep(stage.stage->parameters);
    aside->keep(stage.stage->buffers);
    aside->keep(stage.flights[microbatch].inputs);
    const auto scope = ladder::put_aside_in_scope(aside);
    return stage.stage->forward(input);
  }
  const bool compared = stage.again.rung == StageRung::compared;
  try {
    return forward_to_recompute(
        {*stage.stage, stage.flights[microbatch].skips, keywords.keep(), compared,
         [&turns = turns_, rank = rank_] { return turns.drew_together(rank); }, work_.hidden_state},
        input);
  } catch (const CannotRunAgain& refused) {
    stage.again.refusal = refused.what_without_backtrace();
    throw;
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
  flight.outputs.assign(1, piece.weight > 0 ? piece.loss : at::Tensor());
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

}  // namespace brimful::pipeline
