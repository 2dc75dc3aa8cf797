#pragma once
#include <brimful/pipeline/peers.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/transport/box_channel.h"
#include "pipeline/transport/group_channel.h"
#include "pipeline/transport/lane_watch.h"

namespace brimful::pipeline {

/// What the ranks of a pipeline add up when an attempt has ended. Travels as it lies in memory.
struct PeerFacts {
  bool refine = false;       ///< a rank of this pipeline ran out of memory
  int64_t microbatches = 0;  ///< that a call begins with: the most that a rank asks for
  int64_t rows = 0;          ///< that the ranks must have alike
  int64_t ties = 0;          ///< tied weights, of all ranks
  int64_t setup = 0;         ///< a number of what else they must have alike; 0: not asked for
  int64_t links = 0;         ///< new ones' name: the largest of all ranks; 0: no rank wants any
  bool lost_link = false;    ///< those there are will not deliver all that was sent
  bool has_more = false;     ///< a rank has more to do once the step stands, in which it may fail
  bool may_split = true;     ///< no rank's BatchNorms refuse to
  bool broken = false;       ///< a rank's group of replicas broke, or that of the pipeline
  bool regroup = false;      ///< a rank asks all to form new groups, see ControlRecord
  uint8_t stop = 0;          ///< a rank asks all to stop, see ControlRecord
  double loss_sum = 0;
  double weight = 0;
};

/// How an attempt has ended on the rank that it ended worst on; rank -1: the ranks were given different things to do.
struct PeerVerdict : Failure, PeerFacts {
  PeerVerdict() {
    rank = 0;
    kind = Status::ok;
  }
};

class Peers {
 public:
  /// A backend between two ranks alone, for lanes between their devices; `name` is the same at both ends.
  using MakePair = std::function<c10::intrusive_ptr<c10d::Backend>(const std::string& name,
                                                                   DeviceLane::End end)>;

  /// `make_pair`: in place of NCCL's. `sockets`: between ranks on one host.
  explicit Peers(c10::intrusive_ptr<c10d::ProcessGroup> group, MakePair make_pair = {},
                 bool sockets = true);

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }
  /// This rank's stages are there.
  /// @throws c10::ValueError where the group has nothing that moves messages between such devices
  void use(c10::Device device);
  bool is_on_device() const { return !device_.is_cpu(); }
  /// Links each two ranks whose stages follow each other where they are placed so: by a socket on one host, by lanes
  /// between devices. Called by all; each waits for its neighbours.
  void connect(int64_t name, const std::vector<int>& rank_of_stage);
  /// They are to be made before a step.
  bool wants_links() const { return placed_.empty(); }
  /// @throws c10::ValueError unless devices are linked for stages placed so
  void require_links(const std::vector<int>& rank_of_stage) const;
  void drop_links() noexcept;
  /// While what it returns is there the lanes between devices are looked after; on the CPU nothing.
  std::jthread look_after() { return is_on_device() ? watch_.look_after() : std::jthread(); }
  /// Waits on the host until all messages between devices have arrived.
  /// @throws RankFailed if they will not
  void await_messages() { watch_.await_arrival(); }
  /// One of `from` and `to` is this rank; `number`: the channel's own, the same at both ends.
  std::unique_ptr<Channel> channel(int from, int to, int number);

  /// Passes the worst verdict along the ranks, and the final one back: 2 * (ranks - 1) small messages in all. Called by
  /// every rank after its last action of an attempt. Where lanes were given up this rank's own is an error.
  /// @throws RankFailed if the group broke, or lanes were given up when the others knew of none
  PeerVerdict agree(const PeerVerdict& own);
  /// Every rank's text, by rank; called by all.
  std::vector<std::string> exchange(const std::string& own);
  /// Between two ranks, in their order; the receiver knows size and dtype, and waits.
  c10::intrusive_ptr<c10d::Work> send(int peer, const at::Tensor& tensor);
  void receive(int peer, at::Tensor& tensor);
  int64_t messages() const { return messages_; }

 private:
  void send(int peer, const PeerVerdict& verdict, int tag);
  PeerVerdict receive(int peer, int tag);
  /// With what has become of this rank's links.
  PeerVerdict with_lanes(PeerVerdict own);
  [[noreturn]] void throw_broken(Status own, const std::string& text) const;

  void connect(const std::string& prefix, int low, int high);
  std::shared_ptr<LocalSocket> open_socket(int peer);
  std::unique_ptr<DeviceLane> open_lane(const std::string& prefix, int from, int to);
  bool has_lost_link() const;
  std::vector<DeviceLane*> lanes() const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  MakePair make_pair_;
  bool sockets_;
  c10::Device device_{c10::DeviceType::CPU};
  std::vector<int> placed_;                          ///< that there are links for
  std::map<int, std::unique_ptr<Outbox>> outboxes_;  ///< by the rank at their other end
  std::map<int, std::unique_ptr<Inbox>> inboxes_;
  at::Tensor outgoing_;  ///< verdicts: what passes them on takes no memory
  at::Tensor incoming_;
  int64_t messages_ = 0;  ///< of verdicts that this rank has sent
  LaneWatch watch_;
};

}  // namespace brimful::pipeline
