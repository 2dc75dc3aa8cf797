#include <brimful/log.h>
#include <brimful/pipeline/schedule_text.h>

#include <algorithm>

#include "pipeline/executor/rank_run.h"

namespace brimful::pipeline {

void InFlight::drop_inputs() {
  if (!inputs.empty()) {
    shapes = Shapes(inputs);
    inputs.clear();
  }
}

std::string InFlight::input_shapes() const {
  return (inputs.empty() ? shapes : Shapes(inputs)).to_text();
}

void StageRun::begin(const Schedule& schedule, const std::vector<int>& rank_of_stage) {
  const auto microbatches = static_cast<size_t>(schedule.microbatches);
  const bool sends = has_communication(schedule);
  const auto is_apart = [&](int other) {
    return sends && other >= 0 && other < schedule.stages &&
           rank_of_stage[other] != rank_of_stage[index];
  };
  inputs_apart = is_apart(index - 1);
  outputs_apart = is_apart(index + 1);
  drop();
  flights.resize(microbatches);
  waiting_outputs.resize(microbatches);
  waiting_gradients.resize(microbatches);
  received.resize(microbatches);
  received_gradients.resize(microbatches);
  live = peak_live = 0;
  live_bytes = peak_live_bytes = 0;
}

void StageRun::hold(InFlight& flight, int64_t bytes) {
  if (!flight.live) {
    return;
  }
  bytes = std::max(bytes, -flight.bytes);  // what others had allocated may have gone too
  flight.bytes += bytes;
  live_bytes += bytes;
  peak_live_bytes = std::max(peak_live_bytes, live_bytes);
}

std::string StageRun::left_undone() const {
  for (size_t i = 0; i < flights.size(); ++i) {
    const auto microbatch = static_cast<int>(i);
    switch (flights[i].phase) {
      case Phase::due:
        return to_text({index, ActionKind::forward, microbatch});
      case Phase::forwarded:
        return to_text({index, ActionKind::backward, microbatch});
      case Phase::inputs_done:
        return to_text({index, ActionKind::backward_weight, microbatch});
      case Phase::done:
        break;
    }
  }
  return "";
}

void StageRun::learn_split(const InputBackward& split) {
  splits = !split.recomputed;
  const auto note = split.recomputed
                        ? "not split: activations are computed anew in a backward (checkpointing), "
                          "and would be twice in two parts"
                        : split.note;
  if (!note.empty() && split_note.empty()) {
    split_note = note;
    log(LogLevel::warning, "the backward of stage " + std::to_string(index) +
                               (stage->name.empty() ? "" : " (" + stage->name + ")") + " is " +
                               note);
  }
}

void StageRun::drop() {
  flights.clear();
  waiting_outputs.clear();
  waiting_gradients.clear();
  received.clear();
  received_gradients.clear();
  caller_gradients.clear();
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

void RankRun::pass_by(StageRun& stage, const Action& action) {
  const auto microbatch = action.microbatch;
  auto& phase = stage.flights[microbatch].phase;
  if (action.kind == ActionKind::forward) {
    if (stage.inputs != nullptr) {
      take(*stage.inputs, stage.inputs_apart, stage.received[microbatch], microbatch);
    }
    if (stage.outputs != nullptr) {
      send_outputs(stage, microbatch, {});
    }
    phase = work_.loss ? Phase::forwarded : Phase::done;
  } else if (action.kind == ActionKind::backward_weight) {
    phase = Phase::done;
  } else {
    if (stage.output_gradients != nullptr) {
      take(*stage.output_gradients, stage.outputs_apart, stage.received_gradients[microbatch],
           microbatch);
    }
    send_gradients(stage, microbatch, {});
    phase = action.kind == ActionKind::backward ? Phase::done : Phase::inputs_done;
  }
}

}  // namespace brimful::pipeline
