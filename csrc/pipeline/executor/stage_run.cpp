#include "pipeline/executor/stage_run.h"

#include <brimful/log.h>
#include <brimful/pipeline/schedule_text.h>

#include <algorithm>

namespace brimful::pipeline {

void InFlight::drop_inputs() {
  if (!inputs.empty()) {
    shapes = Shapes(inputs);
    inputs.clear();
  }
}

std::string InFlight::input_shapes() const {
  return (inputs.empty() ? shapes : Shapes(inputs)).to_string();
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
  held = {};
  again = {};
}

void StageRun::begin_flight(InFlight& flight) {
  flight.phase = Phase::forwarded;
  flight.live = true;
  held.peak = std::max(held.peak, ++held.now);
}

void StageRun::end_flight(InFlight& flight) {
  held.now -= flight.live ? 1 : 0;
  held.bytes -= flight.bytes;
  flight.drop_inputs();
  auto shapes = std::move(flight.shapes);
  flight = {};
  flight.phase = Phase::done;
  flight.shapes = std::move(shapes);
}

void StageRun::hold(InFlight& flight, int64_t bytes) {
  if (!flight.live) {
    return;
  }
  bytes = std::max(bytes, -flight.bytes);  // what others had allocated may have gone too
  flight.bytes += bytes;
  held.bytes += bytes;
  held.peak_bytes = std::max(held.peak_bytes, held.bytes);
}

std::string StageRun::left_undone() const {
  for (size_t i = 0; i < flights.size(); ++i) {
    const auto microbatch = static_cast<int>(i);
    switch (flights[i].phase) {
      case Phase::due:
        return to_string({index, ActionKind::forward, microbatch});
      case Phase::forwarded:
        return to_string({index, ActionKind::backward, microbatch});
      case Phase::inputs_done:
        return to_string({index, ActionKind::backward_weight, microbatch});
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

}  // namespace brimful::pipeline
