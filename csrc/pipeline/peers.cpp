#include "pipeline/peers.h"

#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace brimful::pipeline {
namespace {

constexpr int kForwardTag = (1 << 24) - 2;
constexpr int kBackTag = (1 << 24) - 1;
constexpr size_t kTextBytes = 1000;

/// As it is sent.
struct Wire {
  int64_t kind = 0;
  int64_t rank = 0;
  int64_t rows = 0;
  int64_t may_split = 1;
  double loss_sum = 0;
  double weight = 0;
  std::array<char, kTextBytes> text{};
};

PeerVerdict worse(PeerVerdict first, PeerVerdict second) {
  const double loss_sum = first.loss_sum + second.loss_sum;
  const double weight = first.weight + second.weight;
  const bool may_split = first.may_split && second.may_split;
  const bool disagree = first.rows != second.rows;
  auto worst = second.kind > first.kind ? std::move(second) : std::move(first);
  if (disagree && worst.kind == PeerVerdict::Kind::ok) {
    worst.kind = PeerVerdict::Kind::error;
    worst.text = "the ranks were given batches of different sizes; give all the same";
  }
  worst.loss_sum = loss_sum;
  worst.weight = weight;
  worst.may_split = may_split;
  return worst;
}
}  // namespace

Peers::Peers(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

std::unique_ptr<GroupChannel> Peers::channel(int peer, int channel) {
  return std::make_unique<GroupChannel>(group_, peer, first_tag(channel));
}

void Peers::send(int peer, const PeerVerdict& verdict, int tag) {
  Wire wire;
  wire.kind = static_cast<int64_t>(verdict.kind);
  wire.rank = verdict.rank;
  wire.rows = verdict.rows;
  wire.may_split = verdict.may_split ? 1 : 0;
  wire.loss_sum = verdict.loss_sum;
  wire.weight = verdict.weight;
  std::memcpy(wire.text.data(), verdict.text.data(), std::min(verdict.text.size(), kTextBytes));
  auto bytes = at::empty({static_cast<int64_t>(sizeof(Wire))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &wire, sizeof(Wire));
  std::vector<at::Tensor> tensors{bytes};
  group_->send(tensors, peer, tag)->wait();
  ++messages_;
}

PeerVerdict Peers::receive(int peer, int tag) {
  std::vector<at::Tensor> tensors{at::empty({static_cast<int64_t>(sizeof(Wire))}, at::kByte)};
  group_->recv(tensors, peer, tag)->wait();
  Wire wire;
  std::memcpy(&wire, tensors[0].const_data_ptr(), sizeof(Wire));
  PeerVerdict verdict;
  verdict.kind = static_cast<PeerVerdict::Kind>(wire.kind);
  verdict.rank = wire.rank;
  verdict.rows = wire.rows;
  verdict.may_split = wire.may_split != 0;
  verdict.loss_sum = wire.loss_sum;
  verdict.weight = wire.weight;
  verdict.text.assign(wire.text.data(), strnlen(wire.text.data(), kTextBytes));
  return verdict;
}

PeerVerdict Peers::agree(const PeerVerdict& own) {
  const memory::Unlimited unlimited;
  const bool last = rank() + 1 == size();
  auto verdict = own;
  std::string broke;
  // A neighbour that is gone: the other one is told, for it waits.
  const auto talk = [&](const auto& exchange) {
    try {
      exchange();
    } catch (const std::exception&) {
      broke = "the pipeline's process group broke" +
              (own.kind == PeerVerdict::Kind::ok ? "" : " after: " + own.text) +
              " (error: " + brimful::describe(std::current_exception()) + ")";
      verdict = own;
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
  if (!broke.empty()) {
    brimful::detail::throw_rank_failed(own.kind == PeerVerdict::Kind::ok ? -1 : rank(), -1,
                                       FailureKind::error, broke);
  }
  return verdict;
}

std::shared_ptr<Peers> peers_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  TORCH_CHECK_VALUE(group, "a pipeline of several processes needs their group (group: none)");
  return std::make_shared<Peers>(group);
}

}  // namespace brimful::pipeline
