#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/pipeline/value.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace c10 {
struct Event;
}

namespace brimful::pipeline {

/// What moves between two stages: a stage's outputs, cut off from their graph, or the gradients of a stage's inputs, in
/// the same order, undefined where there is none.
struct Message {
  Value value;
  std::vector<char> needs_gradient;  ///< by tensor, of outputs: whether a gradient is to come back
  /// Between processes, what stages before have stashed and no stage has popped: the last tensors of `value`.
  std::vector<std::string> stashed{};
  /// Between two devices of a process: on one of them, behind what the tensors wait for. None: they are there.
  std::shared_ptr<c10::Event> ready{};
};

/// Thrown inside a stage's thread when another one has failed; never leaves the executor.
class BRIMFUL_API Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("the step was cancelled") {}
};

/// One direction between two stages. One thread sends, one receives, each microbatch once a step, in the order in which
/// the schedule has their actions. A transport over a process group puts a header (shapes, dtypes, and the verdict of the
/// sender's step) in front of the payload; in one process the message itself is handed over.
class BRIMFUL_API Channel {
 public:
  virtual ~Channel() = default;
  /// Whether its ends are in two processes: what is stashed goes with the messages then.
  virtual bool is_between_processes() const { return false; }
  /// Does not wait for the receiver.
  virtual void send(int microbatch, Message message) = 0;
  /// Waits until the microbatch's message is there.
  /// @throws Cancelled
  virtual Message receive(int microbatch) = 0;
  /// Before each step, by the thread that calls it: nothing is under way. `rows`: of its batch, the same at both ends.
  virtual void reset(int microbatches, int64_t rows) = 0;

  // Between processes, where the other end waits whatever has happened on this one. In one process all are cancelled.

  /// Sends that there is no message, in its place; nothing where it has been sent.
  virtual void send_failure(int /*microbatch*/) {}
  /// Receives what comes and lets go of it; nothing where it has been received.
  virtual void discard(int /*microbatch*/) {}
  /// Waits until all that was sent has arrived, or the transport has broken.
  virtual void flush() noexcept {}
};

}  // namespace brimful::pipeline
