#pragma once
#include <brimful/pipeline/split_backward.h>
#include <brimful/pipeline/stage.h>

#include <optional>
#include <string>
#include <vector>

#include "pipeline/backward/known_parameters.h"
#include "pipeline/executor/caller_gradients.h"
#include "pipeline/executor/skips.h"
#include "pipeline/executor/stage_rung.h"
#include "pipeline/executor/step_result.h"
#include "pipeline/transport/channel.h"
#include "pipeline/transport/shapes.h"

namespace brimful::pipeline {

/// How far a microbatch has come in a stage.
enum class Phase : uint8_t { due, forwarded, inputs_done, done };

/// A microbatch in a stage between its forward and the end of its backward.
struct InFlight {
  Phase phase = Phase::due;
  bool live = false;                ///< its graph is held
  int64_t bytes = 0;                ///< that its actions have left allocated so far
  std::vector<at::Tensor> inputs;   ///< the stage's, in the message's order
  Shapes shapes;                    ///< of the inputs, once they are let go of
  std::vector<at::Tensor> outputs;  ///< with their graph; undefined where no gradient comes back
  std::optional<double> weight;     ///< of the loss, in the last stage
  WeightWork weight_work;
  SkipRecord skips;
  /// Leaves of the graph that stand for tensors of the caller that need a gradient: inputs of the first stage, and keywords.
  std::vector<CallerLeaf> caller_leaves;
  // Between processes, names of what goes past this stage: with its inputs, and with its outputs.
  std::vector<std::string> came;
  std::vector<std::string> went;

  /// Lets go of the inputs, but for what an error says of them.
  void drop_inputs();
  /// For an error.
  std::string input_shapes() const;
};

/// Microbatches whose graphs a stage holds, and what their actions have left allocated.
struct Held {
  int now = 0;
  int peak = 0;
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};

/// How a stage holds less, and what became of it in this step.
struct SecondForwards {
  StageRung rung = StageRung::none;
  std::string refusal;        ///< why it cannot be recomputed; empty: it could
  bool joined_parts = false;  ///< because of them I did the whole backward
};

/// A stage in the hands of its rank.
struct StageRun {
  int index = 0;
  const Stage* stage = nullptr;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  Channel* inputs = nullptr;            ///< none: the first stage
  Channel* outputs = nullptr;           ///< none: the last stage
  Channel* output_gradients = nullptr;  ///< none: the last stage
  Channel* input_gradients = nullptr;   ///< none: the first stage
  // The schedule has actions of their own for what moves between this stage and the one before, or the next one.
  bool inputs_apart = false;
  bool outputs_apart = false;
  // By microbatch.
  std::vector<InFlight> flights;
  std::vector<std::optional<Message>> waiting_outputs;
  std::vector<std::optional<Message>> waiting_gradients;
  std::vector<std::optional<Message>> received;
  std::vector<std::optional<Message>> received_gradients;
  KnownParameters known_parameters;
  Held held;
  bool splits = true;  ///< false: what I would do is a whole backward, since two parts cost more
  std::string split_note;  ///< why its backward is not, or not entirely, split
  std::vector<CallerGradient> caller_gradients;
  SecondForwards again;

  /// Makes ready for a step.
  void begin(const Schedule& schedule, const std::vector<int>& rank_of_stage);
  /// Between these its graph is held.
  void begin_flight(InFlight& flight);
  void end_flight(InFlight& flight);
  /// The flight's actions have left so many bytes more.
  void hold(InFlight& flight, int64_t bytes);
  /// What the first backward of a stage that is not split, or had better not be, says of it.
  void learn_split(const InputBackward& split);
  /// What a schedule that has ended has not done; empty: nothing.
  std::string left_undone() const;
  /// Lets go of all that a step that was cancelled has left.
  void drop();
};

}  // namespace brimful::pipeline
