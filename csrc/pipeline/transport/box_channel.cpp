#include "pipeline/transport/box_channel.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cstring>

#include "pipeline/transport/group_channel.h"
#include "pipeline/transport/streams.h"

namespace brimful::pipeline {
namespace {
constexpr int64_t kFirstBoxCapacity = 1024;
constexpr int64_t kMostPushed = 1 << 15;  // bytes through a socket, whose buffer has room for more
constexpr int kFirstTag = (1 << 24) - 5;
constexpr int kRestTag = (1 << 24) - 4;

at::Tensor room_for(int64_t bytes) {
  const memory::Unlimited unlimited;  // a refusal here would leave the other end waiting
  return at::empty({bytes}, at::kByte);
}

/// As a lane moves them.
void make_dense(Message& message) {
  for (auto& tensor : message.value.tensors) {
    if (tensor.defined() && !tensor.is_cpu()) {
      tensor = tensor.contiguous().resolve_conj().resolve_neg();
    }
  }
}
}  // namespace

void Outbox::post(const at::Tensor& bytes, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  under_way_.push_back({gloo_->send(tensors, peer_, tag), bytes});
}

bool Outbox::is_lost() const {
  return lost_socket_ || (lane() != nullptr && lane()->is_lost());
}

void Outbox::set(Links links) {
  links_ = std::move(links);
  lost_socket_ = false;
}

void Outbox::begin() {
  capacity_ = std::max({capacity_, most_, kFirstBoxCapacity});
}

void Outbox::push(const void* data, int64_t bytes) {
  try {
    links_.socket->send(data, static_cast<size_t>(bytes));
  } catch (...) {
    lost_socket_ = true;
    throw;
  }
}

// A lane's payload first: what fails there has not yet reached the other end.
void Outbox::send(int64_t place, Message message, int64_t rows) {
  require_plain(message, device_);
  make_dense(message);
  const PackedMessage packed(message, place, rows);
  const auto whole = packed.bytes();
  const auto bytes = room_for(links_.socket ? whole : std::max(capacity_, whole));
  packed.write(bytes.mutable_data_ptr<uint8_t>());
  if (lane() != nullptr) {
    lane()->send(message);
  }
  auto first = capacity_;
  if (links_.socket) {
    first = whole <= kMostPushed ? whole : packed.header_bytes();
    push(bytes.const_data_ptr(), first);
  } else {
    most_ = std::max(most_, whole);
    post(bytes.narrow(0, 0, first), kFirstTag);
  }
  if (whole > first) {
    post(bytes.narrow(0, first, whole - first), kRestTag);
  }
}

void Outbox::send_failure(int64_t place) {
  const auto head = failure_at(place);
  if (links_.socket) {
    return push(&head, sizeof(head));
  }
  const auto bytes = room_for(capacity_);
  std::memcpy(bytes.mutable_data_ptr(), &head, sizeof(head));
  post(bytes, kFirstTag);
}

void Outbox::flush() noexcept {
  try {
    if (links_.socket && !lost_socket_) {
      links_.socket->flush();
    }
  } catch (const std::exception&) {
    lost_socket_ = true;
  }
  wait_for(under_way_);
}

void Inbox::set(Links links) {
  links_ = std::move(links);
  lost_socket_ = false;
  next_.reset();
}

bool Inbox::is_lost() const {
  return lost_socket_ || (lane() != nullptr && (lane()->is_lost() || next_.defined()));
}

void Inbox::begin() {
  capacity_ = std::max({capacity_, most_, kFirstBoxCapacity});
  expected_ = 0;
  arrived_.clear();
}

Transfer Inbox::post(const at::Tensor& bytes, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  return {gloo_->recv(tensors, peer_, tag), bytes};
}

at::Tensor Inbox::next_from_socket() {
  // Who makes up for a step's messages would wait for each of them as long as for the first.
  TORCH_CHECK(!lost_socket_, "the connection to another rank on this host is lost");
  try {
    MessageHead head;
    links_.socket->receive(&head, sizeof(head));
    const auto whole = std::max<int64_t>(head.bytes(), sizeof(head));
    const auto first = whole <= kMostPushed ? whole : head.header_bytes;
    auto bytes = room_for(whole);
    auto* const to = bytes.mutable_data_ptr<uint8_t>();
    std::memcpy(to, &head, sizeof(head));
    links_.socket->receive(to + sizeof(head), first - sizeof(head));
    if (whole > first) {
      post(bytes.narrow(0, first, whole - first), kRestTag).work->wait();
    }
    return bytes;
  } catch (...) {
    lost_socket_ = true;
    throw;
  }
}

at::Tensor Inbox::next_bytes() {
  // What finds its receive posted goes without being asked for.
  for (; expected_ > 0; --expected_) {
    posted_.push_back(post(room_for(capacity_), kFirstTag));
  }
  if (posted_.empty()) {  // of a channel that expects its messages later
    posted_.push_back(post(room_for(capacity_), kFirstTag));
    --expected_;
  }
  const auto first = std::move(posted_.front());
  posted_.pop_front();
  first.work->wait();
  const auto whole = head_of(first.bytes).bytes();
  most_ = std::max(most_, whole);
  if (whole <= capacity_) {
    return first.bytes;
  }
  const auto rest = post(room_for(whole - capacity_), kRestTag);
  rest.work->wait();
  const memory::Unlimited unlimited;
  return at::cat({first.bytes, rest.bytes});
}

void Inbox::fetch(Memory memory) {
  if (!next_.defined()) {
    next_ = links_.socket ? next_from_socket() : next_bytes();
  }
  Arrived arrived{head_of(next_), {}};
  if (arrived.head.failed == 0 && lane() != nullptr) {
    arrived.message = read_message(next_, [&](at::IntArrayRef sizes, at::ScalarType dtype) {
      return lane()->room(sizes, dtype, memory == Memory::of_computing);
    });
    lane()->receive(arrived.message);
  } else if (arrived.head.failed == 0) {
    arrived.message = read_message(next_);
  }
  next_.reset();
  arrived_.emplace(arrived.head.place, std::move(arrived));
}

Inbox::Arrived Inbox::take(int64_t place, Memory memory) {
  auto found = arrived_.extract(place);
  while (!found) {
    fetch(memory);
    found = arrived_.extract(place);
  }
  return std::move(found.mapped());
}

int64_t BoxChannel::place_of(int microbatch) const {
  return int64_t{number_} * kMostMicrobatches + microbatch;
}

void BoxChannel::reset(int microbatches, int64_t rows) {
  require_few(microbatches);
  rows_ = rows;
  expects_ = false;
  done_.assign(microbatches, 0);
  if (outbox_ != nullptr) {
    outbox_->begin();
  } else {
    inbox_->begin();
  }
}

void BoxChannel::send(int microbatch, Message message) {
  outbox_->send(place_of(microbatch), std::move(message), rows_);
  done_[microbatch] = 1;
}

Inbox::Arrived BoxChannel::take(int microbatch, Inbox::Memory memory) {
  if (!expects_) {
    expects_ = true;
    inbox_->expect(static_cast<int>(done_.size()));
  }
  auto arrived = inbox_->take(place_of(microbatch), memory);
  done_[microbatch] = 1;
  return arrived;
}

Message BoxChannel::receive(int microbatch) {
  auto [head, message] = take(microbatch, Inbox::Memory::of_lane);
  if (head.failed != 0) {
    throw PeerFailed();
  }
  if (message.ready != nullptr) {
    await_ready(message, inbox_->lane()->device());
  }
  TORCH_CHECK_VALUE(head.rows == rows_,
                    "the ranks were given batches of different sizes (rows: ", rows_, ", on rank ",
                    inbox_->peer(), ": ", head.rows, "); give all the same");
  return std::move(message);
}

void BoxChannel::send_failure(int microbatch) {
  if (done_[microbatch] == 0) {
    done_[microbatch] = 1;
    outbox_->send_failure(place_of(microbatch));
  }
}

// Into memory of the computing stream, which has what the step that failed has let go of: asking the device for more could
// wait for sends that wait for this.
void BoxChannel::discard(int microbatch) {
  if (done_[microbatch] == 0) {
    const memory::Unlimited unlimited;
    take(microbatch, Inbox::Memory::of_computing);
  }
}

void BoxChannel::flush() noexcept {
  if (outbox_ != nullptr) {
    outbox_->flush();
  }
}

}  // namespace brimful::pipeline
