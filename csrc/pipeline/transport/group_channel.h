#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "pipeline/transport/channel.h"

#include <vector>

#include "pipeline/transport/transfer.h"

namespace brimful::pipeline {

/// Thrown where a message says that its sender's step has failed.
class PeerFailed : public Cancelled {};

/// One direction between stages of two processes, over gloo. A message is one send of a size that both ends know: a header
/// (verdict, shapes, dtypes) with the tensors behind it. Where they do not fit, the header goes alone and says how large
/// the send is that follows it, and from the next step on both ends take that size. The first receive of a step posts all
/// of them where they are small: what finds its receive posted goes without being asked for. Stages, directions and microbatches
/// have tags of their own, so that messages may overtake each other.
class GroupChannel : public Channel {
 public:
  GroupChannel(c10::intrusive_ptr<c10d::ProcessGroup> group, int peer, int first_tag)
      : group_(std::move(group)),
        backend_(group_->getBackend(c10::DeviceType::CPU)),
        peer_(peer),
        first_tag_(first_tag) {}

  bool is_between_processes() const override { return true; }
  void send(int microbatch, Message message) override;
  /// @throws PeerFailed; c10::ValueError if the other end has a batch of another size; c10::Error if the group broke
  Message receive(int microbatch) override;
  void reset(int microbatches, int64_t rows) override;

  void send_failure(int microbatch) override;
  void discard(int microbatch) override;
  void flush() noexcept override;

 private:
  struct Place {
    int64_t capacity = 0;
    bool sent = false;
    bool received = false;
    Transfer arriving{};
  };
  void post(const at::Tensor& bytes, int tag);
  Transfer await(int64_t bytes, int tag);
  void await_all();
  static at::Tensor take(Transfer transfer);
  int tag_of(int microbatch) const { return first_tag_ + 2 * microbatch; }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;  ///< keeps the backend
  c10::intrusive_ptr<c10d::Backend> backend_;
  int peer_;
  int first_tag_;
  int64_t rows_ = 0;
  std::vector<Place> places_;        ///< by microbatch
  std::vector<Transfer> under_way_;  ///< sends
};

/// Tags of a channel: `channel` counts a pipeline's channels. Above those that programs use themselves.
constexpr int kMostMicrobatches = 1 << 12;
/// @throws c10::ValueError
void require_few(int microbatches);
constexpr int first_tag(int channel) {
  return (1 << 24) + channel * 2 * kMostMicrobatches;
}

}  // namespace brimful::pipeline
