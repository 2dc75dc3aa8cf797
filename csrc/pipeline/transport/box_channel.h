#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "pipeline/transport/channel.h"

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "pipeline/transport/device_lane.h"
#include "pipeline/transport/local_socket.h"
#include "pipeline/transport/message_bytes.h"
#include "pipeline/transport/transfer.h"

namespace brimful::pipeline {

/// What two processes have beside their gloo group, either of them or both.
struct Links {
  std::shared_ptr<LocalSocket> socket{};  ///< where they are on one host
  std::unique_ptr<DeviceLane> lane{};     ///< one way, where their stages are on devices
};

/// All that goes from this process to another one, in the order of the sends: messages as bytes (shapes, structure, tensors
/// of the CPU, failures) through a socket, what is large and all else over gloo; and what devices hold over a lane in the
/// same order. So the host knows of every message without asking a device, and every payload that was sent is received,
/// wanted or not.
class Outbox {
 public:
  Outbox(c10::intrusive_ptr<c10d::Backend> gloo, int peer, c10::Device device)
      : gloo_(std::move(gloo)), peer_(peer), device_(device) {}

  void set(Links links);
  DeviceLane* lane() const { return links_.lane.get(); }
  bool is_lost() const;
  void begin();
  void send(int64_t place, Message message, int64_t rows);
  void send_failure(int64_t place);
  void flush() noexcept;

 private:
  void post(const at::Tensor& bytes, int tag);
  void push(const void* data, int64_t bytes);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int peer_;
  c10::Device device_;
  Links links_;
  bool lost_socket_ = false;
  int64_t capacity_ =
      0;  ///< of what both ends know to come; the larger of a step's is the next step's
  int64_t most_ = 0;
  std::vector<Transfer> under_way_;
};

/// The other end. Messages are taken in the order of the sends, and wait here until the schedule asks for them.
class Inbox {
 public:
  struct Arrived {
    MessageHead head;
    Message message;
  };
  /// Whose memory payloads go into: the lane's, or that of what this thread computes.
  enum class Memory { of_lane, of_computing };

  Inbox(c10::intrusive_ptr<c10d::Backend> gloo, int peer) : gloo_(std::move(gloo)), peer_(peer) {}

  int peer() const { return peer_; }
  void set(Links links);
  DeviceLane* lane() const { return links_.lane.get(); }
  /// So is one with a payload on its way that there was no memory for.
  bool is_lost() const;
  void begin();
  /// So many more messages will come in this step, or failures in their place.
  void expect(int messages) { expected_ += messages; }
  /// What throws leaves it to be taken.
  /// @throws c10::Error if the group broke, c10::OutOfMemoryError
  Arrived take(int64_t place, Memory memory);

 private:
  Transfer post(const at::Tensor& bytes, int tag);
  at::Tensor next_bytes();
  at::Tensor next_from_socket();
  void fetch(Memory memory);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int peer_;
  Links links_;
  bool lost_socket_ = false;
  int64_t capacity_ = 0;
  int64_t most_ = 0;
  int expected_ = 0;
  std::deque<Transfer> posted_;
  at::Tensor next_;  ///< bytes of the message whose payload is to be received next
  std::map<int64_t, Arrived> arrived_;
};

/// One direction between stages of two processes that have boxes. Channels between the same processes share their boxes.
class BoxChannel : public Channel {
 public:
  /// One of the boxes is none. `number`: its own among the pipeline's channels, the same at both ends.
  BoxChannel(Outbox* outbox, Inbox* inbox, int number)
      : outbox_(outbox), inbox_(inbox), number_(number) {}

  bool is_between_processes() const override { return true; }
  void send(int microbatch, Message message) override;
  Message receive(int microbatch) override;
  void reset(int microbatches, int64_t rows) override;
  void send_failure(int microbatch) override;
  void discard(int microbatch) override;
  void flush() noexcept override;

 private:
  int64_t place_of(int microbatch) const;
  Inbox::Arrived take(int microbatch, Inbox::Memory memory);

  Outbox* outbox_;
  Inbox* inbox_;
  int number_;
  int64_t rows_ = 0;
  bool expects_ = false;
  std::vector<char> done_;  ///< by microbatch: it was sent, or received
};

}  // namespace brimful::pipeline
