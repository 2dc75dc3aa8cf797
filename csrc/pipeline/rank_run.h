#pragma once
#include <brimful/pipeline/channel.h>
#include <brimful/pipeline/executor.h>
#include <brimful/pipeline/split_backward.h>

#include <optional>
#include <vector>

#include "pipeline/known_parameters.h"
#include "pipeline/skips.h"

namespace brimful::pipeline {

/// A microbatch in a stage between its forward and the end of its backward.
struct InFlight {
  bool live = false;                ///< its graph is held
  std::vector<at::Tensor> inputs;   ///< the stage's, in the message's order
  std::vector<at::Tensor> outputs;  ///< with their graph; undefined where no gradient comes back
  std::optional<double> weight;     ///< of the loss, in the last stage
  WeightWork weight_work;
  std::vector<SkipScope::Named> stashed;
  std::vector<SkipScope::Named> popped;
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
  // The schedule has actions of their own for sending: what is made waits for them.
  bool outputs_apart = false;
  bool gradients_apart = false;
  // By microbatch.
  std::vector<InFlight> flights;
  std::vector<Message> waiting_outputs;
  std::vector<Message> waiting_gradients;
  std::vector<std::optional<Message>> received;
  std::vector<std::optional<Message>> received_gradients;
  KnownParameters known_parameters;
  int live = 0;
  int peak_live = 0;

  /// Lets go of all that a step that was cancelled has left.
  void drop();
};

/// Runs the actions of one rank in one step; used by the rank's thread alone.
class RankRun {
 public:
  RankRun(const StepWork& work, SkipBoard& skips, StepResult& result)
      : work_(work), skips_(skips), result_(result) {}

  /// @throws Cancelled, and what the stage throws
  void run(StageRun& stage, const Action& action);
  /// In place of an action that will not run: what another process waits for, or sends.
  /// @throws c10::Error if the group broke
  static void make_up(StageRun& stage, const Action& action);
  /// How long the last action waited for its message.
  int64_t waited_ns() const { return waited_ns_; }

 private:
  void forward(StageRun& stage, int microbatch);
  void finish_loss(StageRun& stage, int microbatch, const Value& output);
  void keep_outputs(StageRun& stage, int microbatch, Value output);
  void backward(StageRun& stage, int microbatch, bool input_only);
  void backward_weight(StageRun& stage, int microbatch);
  Message receive(Channel& channel, std::optional<Message>* received, int microbatch);
  /// Where a backward begins.
  struct Roots {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> gradients;
  };
  Roots roots_of(StageRun& stage, int microbatch);
  std::vector<at::Tensor> output_gradients(StageRun& stage, int microbatch);
  void send_gradients(StageRun& stage, int microbatch, std::vector<at::Tensor> gradients);

  const StepWork& work_;
  SkipBoard& skips_;
  StepResult& result_;
  int64_t waited_ns_ = 0;
};

}  // namespace brimful::pipeline
