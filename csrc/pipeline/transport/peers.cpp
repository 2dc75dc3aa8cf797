#include "pipeline/transport/peers.h"

#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace brimful::pipeline {
namespace {

constexpr int kTensorTag = (1 << 24) - 3;
constexpr int kForwardTag = (1 << 24) - 2;
constexpr int kBackTag = (1 << 24) - 1;
constexpr size_t kTextBytes = 1000;

/// As it is sent.
struct Wire {
  int64_t kind = 0;
  int64_t rank = 0;
  int64_t replica = 0;
  int64_t refine = 0;
  int64_t rows = 0;
  int64_t ties = 0;
  int64_t setup = 0;
  int64_t links = 0;
  int64_t lost_link = 0;
  int64_t has_more = 0;
  int64_t may_split = 1;
  double loss_sum = 0;
  double weight = 0;
  std::array<char, kTextBytes> text{};
};

PeerVerdict worse(PeerVerdict first, PeerVerdict second) {
  const double loss_sum = first.loss_sum + second.loss_sum;
  const double weight = first.weight + second.weight;
  const bool may_split = first.may_split && second.may_split;
  const int64_t links = std::max(first.links, second.links);
  const bool lost_link = first.lost_link || second.lost_link;
  const bool has_more = first.has_more || second.has_more;
  const int64_t ties = first.ties + second.ties;
  const bool refine = first.refine || second.refine;
  const bool other_rows = first.rows != second.rows;
  const bool other_setup = first.setup != second.setup;
  auto worst = second.kind > first.kind ? std::move(second) : std::move(first);
  if (worst.kind == PeerVerdict::Kind::ok && (other_rows || other_setup)) {
    worst.kind = PeerVerdict::Kind::error;
    worst.rank = -1;
    worst.text = other_rows ? "the ranks were given batches of different sizes; give all the same"
                            : "the ranks' pipelines differ in schedule, microbatches, max_retries, "
                              "kind of device, or the replicas of their stages; make all alike";
  }
  worst.loss_sum = loss_sum;
  worst.weight = weight;
  worst.may_split = may_split;
  worst.refine = refine;
  worst.ties = ties;
  worst.links = links;
  worst.lost_link = lost_link;
  worst.has_more = has_more;
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
  wire.kind = static_cast<int64_t>(verdict.kind);
  wire.rank = verdict.rank;
  wire.replica = verdict.replica;
  wire.refine = verdict.refine ? 1 : 0;
  wire.rows = verdict.rows;
  wire.ties = verdict.ties;
  wire.setup = verdict.setup;
  wire.links = verdict.links;
  wire.lost_link = verdict.lost_link ? 1 : 0;
  wire.has_more = verdict.has_more ? 1 : 0;
  wire.may_split = verdict.may_split ? 1 : 0;
  wire.loss_sum = verdict.loss_sum;
  wire.weight = verdict.weight;
  std::memcpy(wire.text.data(), verdict.text.data(), std::min(verdict.text.size(), kTextBytes));
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
  verdict.kind = static_cast<PeerVerdict::Kind>(wire.kind);
  verdict.rank = wire.rank;
  verdict.replica = wire.replica;
  verdict.refine = wire.refine != 0;
  verdict.rows = wire.rows;
  verdict.ties = wire.ties;
  verdict.setup = wire.setup;
  verdict.links = wire.links;
  verdict.lost_link = wire.lost_link != 0;
  verdict.has_more = wire.has_more != 0;
  verdict.may_split = wire.may_split != 0;
  verdict.loss_sum = wire.loss_sum;
  verdict.weight = wire.weight;
  verdict.text.assign(wire.text.data(), strnlen(wire.text.data(), kTextBytes));
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
  // A neighbour that is gone: the other one is told, for it waits.
  const auto talk = [&](const auto& exchange) {
    try {
      exchange();
    } catch (const std::exception&) {
      broke = "the pipeline's process group broke" +
              (mine.kind == PeerVerdict::Kind::ok ? "" : " after: " + mine.text) +
              " (error: " + brimful::describe(std::current_exception()) + ")";
      verdict = mine;
      verdict.kind = PeerVerdict::Kind::error;
      verdict.rank = rank();
      verdict.text = broke;
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
  const auto late = mine.kind == PeerVerdict::Kind::ok ? watch_.given_up() : "";
  if (!broke.empty() || verdict.lost_link) {
    drop_links();
  }
  watch_.keep();
  if (!broke.empty()) {
    throw_broken(mine.kind, broke);
  }
  if (verdict.kind == PeerVerdict::Kind::ok && !late.empty()) {  // the next step's says so to all
    throw_broken(mine.kind,
                 "the step is not this rank's, though the others found it good: " + late);
  }
  return verdict;
}

PeerVerdict Peers::with_lanes(PeerVerdict own) {
  const auto given_up = watch_.given_up();
  if (own.kind < PeerVerdict::Kind::error && !given_up.empty()) {
    own.kind = PeerVerdict::Kind::error;
    own.rank = rank();
    own.text = given_up;
  }
  own.lost_link |= has_lost_link();
  return own;
}

void Peers::throw_broken(PeerVerdict::Kind own, const std::string& text) const {
  brimful::detail::throw_rank_failed(
      own == PeerVerdict::Kind::ok ? -1 : rank(), -1, Status::error,
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
