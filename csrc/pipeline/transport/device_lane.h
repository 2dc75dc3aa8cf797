#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "pipeline/transport/channel.h"

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// One direction between the devices of two processes, over a backend of theirs alone whose work is on streams (NCCL).
/// Both ends name the tensors in the same order: what is sent is matched by order alone, and a send ends with its receive.
/// That nothing goes the other way on the same communicator is what keeps two ranks that send to each other from waiting
/// for each other. Everything is on a stream of the lane's own: a send waits for what the sender has computed until then,
/// the receiver's computing for what it uses, and no host for anything. A communicator is aborted from any thread, all else is
/// one thread's.
class DeviceLane {
 public:
  enum class End : int { sends, receives };  ///< the end's rank in the backend

  /// Waits for the other end.
  DeviceLane(c10::intrusive_ptr<c10d::Backend> backend, c10::Device device, End end);
  /// Waits until what is under way has arrived, for some seconds at most.
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  c10::Device device() const { return device_; }
  /// What is under way so far is of steps that stand: abort() waits for it.
  void keep();
  /// Those of the message's tensors that are on the device, which are dense.
  void send(const Message& message);
  /// Memory of a tensor to come: the lane's own, or of this thread's computing stream.
  at::Tensor room(at::IntArrayRef sizes, at::ScalarType dtype, bool of_computing) const;
  /// Fills those of the message's tensors that are on the device, and notes when they are there.
  void receive(Message& message);
  /// Ends what is under way, at both ends if both call it: devices would wait for it for ever. Returns whether what is kept
  /// had arrived.
  bool abort() noexcept;
  /// What has begun will not be ended as the other end expects.
  bool is_lost() const { return lost_; }

  // From any thread.
  /// Why what is under way will not arrive: an error of the backend, or its timeout, shortly before torch's watchdog would
  /// end the process; empty: nothing is known.
  std::string trouble() noexcept;
  /// Whether nothing is under way.
  bool has_arrived();
  /// When what has been under way for the longest time began; now, if nothing is.
  std::chrono::steady_clock::time_point waits_since();

 private:
  struct UnderWay {
    std::chrono::steady_clock::time_point since;
    std::shared_ptr<c10::Event> end;  ///< none: it is being asked for
  };
  template <typename Move>
  std::shared_ptr<c10::Event> move(const Message& message, const Move& move);
  bool settled(const c10::Event& event) noexcept;
  void forget_arrived();

  mutable std::mutex mutex_;  ///< of backend_, kept_ and under_way_
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::optional<std::chrono::milliseconds> patience_;
  c10::Device device_;
  int other_;
  c10::Stream stream_;
  std::shared_ptr<c10::Event> kept_;
  std::deque<UnderWay> under_way_;
  std::atomic<bool> lost_{false};
};

}  // namespace brimful::pipeline
