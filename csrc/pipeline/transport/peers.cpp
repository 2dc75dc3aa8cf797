#include "pipeline/transport/peers.h"

#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace brimful::pipeline {
namespace {

constexpr int kTensorTag = (1 << 24) - 3;
constexpr int kForwardTag = (1 << 24) - 2;
constexpr int kBackTag = (1 << 24) - 1;
constexpr size_t kFailureBytes = 1024;  // a longer text is cut

/// As it is sent.
struct Wire {
  PeerFacts facts;
  uint64_t failure_bytes = 0;
  std::array<uint8_t, kFailureBytes> failure{};
};
static_assert(std::is_trivially_copyable_v<Wire>);

PeerVerdict worse(PeerVerdict first, PeerVerdict second) {
  PeerFacts both = second.kind > first.kind ? second : first;
  both.loss_sum = first.loss_sum + second.loss_sum;
  both.weight = first.weight + second.weight;
  both.may_split = first.may_split && second.may_split;
  both.refine = first.refine || second.refine;
  both.microbatches = std::max(first.microbatches, second.microbatches);
  both.ties = first.ties + second.ties;
  both.links = std::max(first.links, second.links);
  both.lost_link = first.lost_link || second.lost_link;
  both.has_more = first.has_more || second.has_more;
  both.broken = first.broken || second.broken;
  both.regroup = first.regroup || second.regroup;
  both.stop = std::max(first.stop, second.stop);
  const bool other_rows = first.rows != second.rows;
  const bool other_setup = first.setup != second.setup;
  auto worst = second.kind > first.kind ? std::move(second) : std::move(first);
  if (worst.kind == Status::ok && (other_rows || other_setup)) {
    worst.kind = Status::error;
    worst.rank = -1;
    worst.text = other_rows ? "the ranks were given batches of different sizes; give all the same"
                            : "the ranks' pipelines differ in schedule, microbatches, max_retries, "
                              "kind of device, the replicas of their stages, or the steps that "
                              "their parameters have taken; make all alike";
  }
  static_cast<PeerFacts&>(worst) = both;
  return worst;
}
}  // namespace

Peers::Peers(c10::intrusive_ptr<c10d::ProcessGroup> group, MakePair make_pair, bool sockets)
    : group_(std::move(group)),
      make_pair_(std::move(make_pair)),
      sockets_(sockets),
      watch_(group_->getStore()) {
  const memory::Unlimited unlimited;
  outgoing_ = at::empty({static_cast<int64_t>(sizeof(Wire))}, at::kByte);
  incoming_ = at::empty_like(outgoing_);
}

void Peers::send(int peer, const PeerVerdict& verdict, int tag) {
  Wire wire;
  wire.facts = verdict;
  const auto failure = encode(verdict, kFailureBytes);
  wire.failure_bytes = failure.size();
  std::copy(failure.begin(), failure.end(), wire.failure.begin());
  std::memcpy(outgoing_.mutable_data_ptr(), &wire, sizeof(Wire));
  std::vector<at::Tensor> tensors{outgoing_};
  group_->send(tensors, peer, tag)->wait();
  ++messages_;
}

PeerVerdict Peers::receive(int peer, int tag) {
  std::vector<at::Tensor> tensors{incoming_};
  group_->recv(tensors, peer, tag)->wait();
  Wire wire;
  std::memcpy(&wire, tensors[0].const_data_ptr(), sizeof(Wire));
  PeerVerdict verdict;
  static_cast<PeerFacts&>(verdict) = wire.facts;
  const auto bytes = std::min<uint64_t>(wire.failure_bytes, kFailureBytes);
  auto failure = decode_failure({wire.failure.begin(), wire.failure.begin() + bytes});
  if (!failure) {
    throw std::runtime_error(
        "rank " + std::to_string(peer) +
        " sent no verdict that this rank can read; run the same version of brimful on all ranks");
  }
  static_cast<Failure&>(verdict) = std::move(*failure);
  return verdict;
}

c10::intrusive_ptr<c10d::Work> Peers::send(int peer, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return group_->send(tensors, peer, kTensorTag);
}

void Peers::receive(int peer, at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  group_->recv(tensors, peer, kTensorTag)->wait();
}

std::vector<std::string> Peers::exchange(const std::string& own) {
  const memory::Unlimited unlimited;
  const auto size = at::full({1}, std::ssize(own), at::kLong);
  auto bytes = at::empty({std::ssize(own)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
  std::vector<c10::intrusive_ptr<c10d::Work>> sends;
  for (int peer = 0; peer < this->size(); ++peer) {
    if (peer != rank()) {
      sends.push_back(send(peer, size));
      if (!own.empty()) {
        sends.push_back(send(peer, bytes));
      }
    }
  }
  std::vector<std::string> all(this->size(), own);
  for (int peer = 0; peer < this->size(); ++peer) {
    if (peer == rank()) {
      continue;
    }
    auto count = at::empty({1}, at::kLong);
    receive(peer, count);
    auto theirs = at::empty({count.item<int64_t>()}, at::kByte);
    if (theirs.numel() > 0) {
      receive(peer, theirs);
    }
    all[peer].assign(static_cast<const char*>(theirs.const_data_ptr()), theirs.numel());
  }
  for (const auto& work : sends) {
    work->wait();
  }
  return all;
}

PeerVerdict Peers::agree(const PeerVerdict& own) {
  const memory::Unlimited unlimited;
  const bool last = rank() + 1 == size();
  auto verdict = with_lanes(own);
  const auto mine = verdict;
  std::string broke;
  // A neighbour that is gone: the other one is informed, for it waits.
  const auto talk = [&](const auto& exchange) {
    try {
      exchange();
    } catch (const std::exception&) {
      broke = "the pipeline's process group broke" +
              (mine.kind == Status::ok ? "" : " after: " + mine.text) +
              " (error: " + brimful::to_string(std::current_exception()) +
              "); look at the other ranks' output, and start the job again";
      verdict = mine;
      verdict.kind = Status::error;
      verdict.rank = rank();
      verdict.text = broke;
      verdict.broken = true;
    }
  };
  if (rank() > 0) {
    talk([&] { verdict = worse(receive(rank() - 1, kForwardTag), std::move(verdict)); });
  }
  if (!last) {
    talk([&] {
      send(rank() + 1, verdict, kForwardTag);
      auto theirs = receive(rank() + 1, kBackTag);
      verdict = broke.empty() ? std::move(theirs) : std::move(verdict);
    });
  }
  if (rank() > 0) {
    talk([&] { send(rank() - 1, verdict, kBackTag); });
  }
  const auto late = mine.kind == Status::ok ? watch_.given_up() : "";
  if (!broke.empty() || verdict.lost_link) {
    drop_links();
  }
  watch_.keep();
  if (!broke.empty()) {
    throw_broken(mine.kind, broke);
  }
  if (verdict.kind == Status::ok && !late.empty()) {  // the next step's says so to all
    throw_broken(mine.kind,
                 "the step failed on this rank, after all ranks had found it good: " + late);
  }
  return verdict;
}

PeerVerdict Peers::with_lanes(PeerVerdict own) {
  const auto given_up = watch_.given_up();
  if (own.kind < Status::error && !given_up.empty()) {
    own.kind = Status::error;
    own.rank = rank();
    own.text = given_up;
  }
  own.lost_link |= has_lost_link();
  return own;
}

void Peers::throw_broken(Status own, const std::string& text) const {
  brimful::detail::throw_rank_failed(
      own == Status::ok ? -1 : rank(), -1, Status::error,
      text + (watch_.has_lost_kept()
                  ? "; gradients of an earlier step were still under way between the devices: what "
                    "was "
                    "computed from them on this rank may have any values, go on from a checkpoint"
                  : ""));
}

std::shared_ptr<Peers> peers_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  TORCH_CHECK_VALUE(group, "a pipeline of several processes needs their group (group: none)");
  auto peers = std::make_shared<Peers>(group);
  peers->use(c10::Device(c10::DeviceType::CPU));
  return peers;
}

}  // namespace brimful::pipeline
