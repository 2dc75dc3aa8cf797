#include "pipeline/transport/group_channel.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "pipeline/transport/message_bytes.h"

namespace brimful::pipeline {
namespace {

constexpr int64_t kFirstMessageCapacity = 4096;
constexpr int64_t kMostAwaited = 1 << 20;  // bytes of a step's receives that are posted at once

at::Tensor bytes_of(int64_t count) {
  return at::empty({count}, at::kByte);
}
}  // namespace

void require_few(int microbatches) {
  TORCH_CHECK_VALUE(
      microbatches <= kMostMicrobatches,
      "there are too many microbatches for one step between processes (microbatches: ",
      microbatches, ", at most: ", kMostMicrobatches, ")");
}

void GroupChannel::post(const at::Tensor& bytes, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  under_way_.push_back({backend_->send(tensors, peer_, tag), bytes});
}

Transfer GroupChannel::await(int64_t bytes, int tag) {
  const memory::Unlimited
      unlimited;  // a refusal here would leave the peer's send without its receive
  std::vector<at::Tensor> tensors{bytes_of(bytes)};
  auto work = backend_->recv(tensors, peer_, tag);
  return {std::move(work), std::move(tensors[0])};
}

// Each microbatch is received once in a step, whatever happens in it: none of these stays behind.
void GroupChannel::await_all() {
  int64_t bytes = 0;
  for (const auto& place : places_) {
    bytes += place.capacity;
  }
  for (int i = 0; bytes <= kMostAwaited && i < std::ssize(places_); ++i) {
    auto& place = places_[i];
    if (!place.received && !place.arriving.work) {
      place.arriving = await(place.capacity, tag_of(i));
    }
  }
}

at::Tensor GroupChannel::take(Transfer transfer) {
  transfer.work->wait();
  return std::move(transfer.bytes);
}

void GroupChannel::send(int microbatch, Message message) {
  require_plain(message, c10::Device(c10::DeviceType::CPU));
  const memory::Unlimited unlimited;
  auto& place = places_[microbatch];
  const PackedMessage packed(message, tag_of(microbatch), rows_);
  const auto whole = packed.bytes();
  // All is made before anything leaves: a part without the rest would be waited for.
  const auto bytes = bytes_of(std::max(place.capacity, whole));
  packed.write(bytes.mutable_data_ptr<uint8_t>());
  place.sent = true;
  const auto first = std::exchange(place.capacity, std::max(place.capacity, whole));
  if (first >= whole) {
    post(bytes, tag_of(microbatch));
  } else {
    post(bytes.narrow(0, 0, first), tag_of(microbatch));
    post(bytes.narrow(0, first, whole - first), tag_of(microbatch) + 1);
  }
}

Message GroupChannel::receive(int microbatch) {
  auto& place = places_[microbatch];
  if (!place.arriving.work) {
    await_all();
  }
  place.received = true;
  auto bytes = take(place.arriving.work ? std::exchange(place.arriving, {})
                                        : await(place.capacity, tag_of(microbatch)));
  const auto head = head_of(bytes);
  if (head.failed != 0) {
    throw PeerFailed();
  }
  if (head.bytes() > place.capacity) {
    const auto rest = take(await(head.bytes() - place.capacity, tag_of(microbatch) + 1));
    const memory::Unlimited unlimited;
    bytes = at::cat({bytes, rest});
    place.capacity = head.bytes();
  }
  TORCH_CHECK_VALUE(head.rows == rows_,
                    "the ranks were given batches of different sizes (rows: ", rows_, ", on rank ",
                    peer_, ": ", head.rows, "); give all the same");
  return read_message(bytes);
}

void GroupChannel::send_failure(int microbatch) {
  auto& place = places_[microbatch];
  if (place.sent) {
    return;
  }
  const memory::Unlimited unlimited;
  const auto first = bytes_of(place.capacity);
  const auto head = failure_at(tag_of(microbatch));
  std::memcpy(first.mutable_data_ptr(), &head, sizeof(head));
  place.sent = true;
  post(first, tag_of(microbatch));
}

void GroupChannel::discard(int microbatch) {
  if (places_[microbatch].received) {
    return;
  }
  const memory::Unlimited unlimited;
  try {
    receive(microbatch);
  } catch (const PeerFailed&) {
  } catch (const c10::ValueError&) {  // of another batch: let go of all the same
  }
}

void GroupChannel::reset(int microbatches, int64_t rows) {
  rows_ = rows;
  require_few(microbatches);
  if (microbatches != std::ssize(places_)) {
    places_.clear();
    places_.resize(microbatches, {kFirstMessageCapacity});
  }
  for (auto& place : places_) {
    place.sent = place.received = false;
    place.arriving = {};
  }
}

void GroupChannel::flush() noexcept {
  wait_for(under_way_);
}

}  // namespace brimful::pipeline
