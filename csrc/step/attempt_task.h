#pragma once
#include <brimful/step/piece_work.h>

#include <cstdint>
#include <string>

namespace brimful {

/// What one attempt runs and decides, as a PiecesRun asks for it.
class AttemptTask {
 public:
  virtual ~AttemptTask() = default;
  /// Rows [begin, end) of this rank's batch.
  virtual PieceLoss forward(int64_t begin, int64_t end) = 0;
  /// Of `loss`, with `seed` as its gradient.
  virtual void backward(const at::Tensor& loss, const at::Tensor& seed) = 0;
  /// The pieces have run, and the model's buffers are not yet in the last bucket. Again if memory runs out there.
  virtual void finish_buffers() = 0;
  /// For ControlRecord::ref, when the pieces have run.
  virtual uint32_t mark() = 0;

  // After an error, whose handler has ended.
  /// It is to be run once more, though memory did not run out.
  virtual bool starts_over() = 0;
  /// The batch has the error but in pieces so small: it counts as out of memory.
  virtual bool is_too_fine(const std::string& error) = 0;
  /// How many pieces this rank wants for a repetition that all ranks make in as many. `as_it_was`: may_do_as_it_was() said so.
  virtual int64_t pieces_again(bool as_it_was) = 0;
  /// After a shortage, which asks the device: the same split may do.
  virtual bool may_do_as_it_was(const std::string& shortage) = 0;
};

}  // namespace brimful
