#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include "pipeline/transport/channel.h"

#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace brimful::pipeline {

/// The way of messages from one device to another, on streams of its own: neither device's computing waits for a copy but
/// where it uses what is copied, and a copy waits for what it reads alone. Memory that another stream than its own reads
/// is not used again before that has: both ends inform the allocator. No host waits, but where it reads a copy itself.
///
/// depart() belongs to the sender's thread, arrive() to the receiver's; current streams are those they compute on.
class CopyLane {
 public:
  /// None between parts of one device, which compute on one stream.
  static std::optional<CopyLane> between(c10::Device from, c10::Device to);

  /// Begins the copy. To the CPU it notes when it may begin.
  void depart(Message& message) const;
  /// Ends it, for what the receiver's stream does from now on.
  void arrive(Message& message) const;
  /// Both, by the receiver's thread, of what was left with left_at().
  void fetch(Message& message) const;

 private:
  CopyLane(c10::Device from, c10::Device to);
  bool takes(const at::Tensor& tensor) const;
  void begin(Message& message) const;
  void copy_all(Message& message) const;

  c10::Device from_;
  c10::Device to_;
  std::vector<c10::Stream> streams_;  ///< of those devices that have some
};

/// Notes when what this thread's computing stream makes of `tensor` is there, for whoever fetches it.
Message left_at(at::Tensor tensor);

/// The lanes between a process's devices, made when they are first used. From any thread.
class CopyLanes {
 public:
  /// A tensor that was left with left_at(), on `device`.
  at::Tensor fetch(Message message, c10::Device device);

 private:
  const std::optional<CopyLane>& between(c10::Device from, c10::Device to);

  std::mutex mutex_;
  std::map<std::pair<size_t, size_t>, std::optional<CopyLane>> lanes_;
};

}  // namespace brimful::pipeline
