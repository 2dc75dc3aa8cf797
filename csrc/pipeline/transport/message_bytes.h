#pragma once
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include "pipeline/transport/channel.h"

namespace brimful::pipeline {

/// What a message between processes begins with.
struct MessageHead {
  int64_t failed = 0;  ///< its sender's step has: nothing else counts
  int64_t place = 0;   ///< which message it is, where they come one behind the other
  int64_t rows = 0;
  int64_t tensors = 0;
  int64_t text_bytes = 0;
  int64_t header_bytes = 0;
  int64_t payload_bytes = 0;

  int64_t bytes() const { return header_bytes + payload_bytes; }
};

/// A message as bytes: the head, dtypes and shapes, names and structure, and what tensors on the CPU hold. Of tensors on
/// other devices it has dtype and shape alone.
class PackedMessage {
 public:
  /// The message outlives it.
  PackedMessage(const Message& message, int64_t place, int64_t rows);
  int64_t bytes() const { return head_.bytes(); }
  int64_t header_bytes() const { return head_.header_bytes; }
  void write(uint8_t* to) const;

 private:
  const Message& message_;
  MessageHead head_;
  c10::SmallVector<int64_t, 32> words_;  ///< of the tensors
  std::string text_;
};

/// Makes a tensor whose contents are not in the bytes.
using MakeApart = c10::function_ref<at::Tensor(at::IntArrayRef sizes, at::ScalarType dtype)>;

/// @throws c10::TypeError for tensors that cannot go to another process from a stage on `device`
void require_plain(const Message& message, c10::Device device);
MessageHead head_of(const at::Tensor& bytes);
/// `bytes` begin with a PackedMessage's.
Message read_message(const at::Tensor& bytes, MakeApart make_apart);
/// All tensors are in the bytes.
Message read_message(const at::Tensor& bytes);
/// In place of a message: that there is none.
MessageHead failure_at(int64_t place);

}  // namespace brimful::pipeline
