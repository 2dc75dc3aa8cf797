#pragma once
#include <brimful/pipeline/peers.h>
#include <brimful/pipeline/schedule.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/participant.h>
#include <brimful/step/transaction.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace brimful {
class GradScaler;
}

namespace brimful::pipeline {

struct PipelineOptions {
  /// By rank: as many as there are stages, or fewer where the schedule gives a rank several. Empty: the CPU, once a stage.
  std::vector<c10::Device> devices;
  /// Each process has one rank's stages, and makes all calls with the same batch: what fails on one fails on all.
  std::shared_ptr<Peers> peers;
  /// Those of the stages, of which other processes have replicas (as many on all ranks): the mean is over all their rows.
  std::vector<std::shared_ptr<Participant>> reducers;
  /// Parameters that stages have copies of, on this rank or on several, each with the name that its copies share: they begin
  /// with the values of the lowest rank's first one, and each gets the sum of their gradients.
  std::vector<std::pair<std::string, at::Tensor>> tied;
  std::string schedule = "1f1b";  ///< a name that make_schedule() knows
  /// In place of `schedule`: one of your own for a number of microbatches, which must be the one asked for.
  std::function<Schedule(int microbatches)> schedule_for;
  /// In place of both: one schedule, of its own number of microbatches, which `microbatches` must be. A step that runs out
  /// of memory is then repeated with stages recomputed alone, or raises BatchTooLarge, which says so.
  std::optional<Schedule> fixed_schedule;
  int64_t microbatches =
      1;  ///< at least; doubled whenever memory runs out, and fewer again with room
  int64_t max_retries = 8;
  /// A step that runs out of memory with the smallest microbatches is repeated with a stage that runs its forward again in
  /// backward (the one of that device which holds most, then all of them), and so are later steps: bit-equal to a step with
  /// room. Not where `max_retries` is 0. Each process, and each replica, decides for its own stages.
  bool recompute = true;
  /// Where that is not enough, or not allowed, what all stages of the device save for backward is offloaded instead. In a
  /// process without Python an engine of autograd with hooks for what is saved then takes the place of LibTorch's, which
  /// has none. Either rung is left again when there is more room than when it was begun.
  bool offload = false;
  std::vector<int>
      recomputed;  ///< stages that do so from the first step on, by their numbers in the pipeline
  bool recompute_all = false;  ///< all do
  /// What changes where a stage's forward does something that a second one could not repeat, such as to draw random numbers of
  /// another language: asked before and after the forward of a stage that is recomputed, by its thread. Optional.
  std::function<int64_t()> hidden_state;
  int threads_per_rank = 0;  ///< of CPU operators in a stage; 0: the caller's, shared out
  std::chrono::microseconds spin{100};
  bool trace = true;
  BatchNormPolicy batch_norm = BatchNormPolicy::warn;
  GradScaler* scaler = nullptr;  ///< as in BatchSizerOptions; outlives the pipeline
  std::vector<Transaction::Keeper> keepers;
  std::function<void(int rank, int index, const Action& action)> before_action;
  /// Called by the caller's thread some twenty times a second while stages work, and once when they are done. What it throws
  /// ends the call as cancel() does, and comes out of it.
  std::function<void()> interrupt;
  /// How long a call that was ended waits for the actions that are under way. A stage whose action takes longer is abandoned.
  std::chrono::milliseconds patience{1000};
  std::function<std::exception_ptr(std::exception_ptr)> translate;
  std::function<std::shared_ptr<void>()> thread_scope;
};

}  // namespace brimful::pipeline
