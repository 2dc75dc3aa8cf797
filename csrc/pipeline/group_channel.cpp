#include "pipeline/group_channel.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cstring>

namespace brimful::pipeline {
namespace {

constexpr int64_t kFirstCapacity = 4096;
constexpr int64_t kAlignment = 64;

enum Word : int64_t { kFailed, kTensors, kHeaderBytes, kPayloadBytes, kWords };

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

at::Tensor bytes_of(int64_t count) {
  return at::empty({count}, at::kByte);
}

/// Of each tensor: whether it is there, its dtype, whether it needs a gradient, its dimensions and sizes.
std::vector<int64_t> header_of(const std::vector<at::Tensor>& tensors,
                               const std::vector<char>& needs_gradient) {
  std::vector<int64_t> words(kWords, 0);
  words[kTensors] = std::ssize(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    words.push_back(tensor.defined() ? 1 : 0);
    if (!tensor.defined()) {
      continue;
    }
    words.push_back(static_cast<int64_t>(tensor.scalar_type()));
    words.push_back(i < needs_gradient.size() ? needs_gradient[i] : 0);
    words.push_back(tensor.dim());
    words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
    words[kPayloadBytes] += aligned(static_cast<int64_t>(tensor.nbytes()));
  }
  words[kHeaderBytes] = aligned(std::ssize(words) * static_cast<int64_t>(sizeof(int64_t)));
  return words;
}

void put_payload(const std::vector<at::Tensor>& tensors, uint8_t* to) {
  for (const auto& tensor : tensors) {
    if (tensor.defined()) {
      const auto dense = tensor.contiguous().resolve_conj().resolve_neg();
      std::memcpy(to, dense.const_data_ptr(), dense.nbytes());
      to += aligned(static_cast<int64_t>(dense.nbytes()));
    }
  }
}

Message message_of(const int64_t* words, const uint8_t* payload) {
  Message message;
  const int64_t count = words[kTensors];
  words += kWords;
  for (int64_t i = 0; i < count; ++i) {
    if (*words++ == 0) {
      message.value.tensors.emplace_back();
      message.needs_gradient.push_back(0);
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(*words++);
    message.needs_gradient.push_back(static_cast<char>(*words++));
    const int64_t dims = *words++;
    auto tensor = at::empty(at::IntArrayRef(words, dims), dtype);
    words += dims;
    std::memcpy(tensor.mutable_data_ptr(), payload, tensor.nbytes());
    payload += aligned(static_cast<int64_t>(tensor.nbytes()));
    message.value.tensors.push_back(std::move(tensor));
  }
  return message;
}

void require_plain(const Value& value) {
  TORCH_CHECK_TYPE(value.form == nullptr,
                   "between processes a stage's output is a tensor or several (form: ",
                   value.form->describe(), "); return a tensor");
  for (const auto& tensor : value.tensors) {
    TORCH_CHECK_TYPE(!tensor.defined() || (tensor.is_cpu() && tensor.layout() == at::kStrided),
                     "between processes tensors are dense and on the CPU (device: ",
                     tensor.device(), ", layout: ", tensor.layout(), ")");
  }
}
}  // namespace

void GroupChannel::post(const at::Tensor& bytes, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  under_way_.emplace_back(group_->send(tensors, peer_, tag), bytes);
}

at::Tensor GroupChannel::take(int64_t bytes, int tag) {
  const memory::Unlimited
      unlimited;  // a refusal here would leave the peer's send without its receive
  std::vector<at::Tensor> tensors{bytes_of(bytes)};
  group_->recv(tensors, peer_, tag)->wait();
  return tensors[0];
}

void GroupChannel::send(int microbatch, Message message) {
  require_plain(message.value);
  const memory::Unlimited unlimited;
  auto& place = places_[microbatch];
  const auto words = header_of(message.value.tensors, message.needs_gradient);
  TORCH_CHECK_VALUE(words[kHeaderBytes] <= place.capacity,
                    "a stage's output has too many tensors to be sent (tensors: ", words[kTensors],
                    "); join some");
  const auto whole = words[kHeaderBytes] + words[kPayloadBytes];
  const bool fits = whole <= place.capacity;
  auto first = bytes_of(place.capacity);
  std::memcpy(first.mutable_data_ptr(), words.data(), words.size() * sizeof(int64_t));
  // All is made before anything leaves: a header without its payload would be waited for.
  const auto payload = fits ? at::Tensor() : bytes_of(words[kPayloadBytes]);
  put_payload(message.value.tensors, fits ? first.mutable_data_ptr<uint8_t>() + words[kHeaderBytes]
                                          : payload.mutable_data_ptr<uint8_t>());
  place.sent = true;
  place.capacity = std::max(place.capacity, whole);
  post(first, tag_of(microbatch));
  if (!fits) {
    post(payload, tag_of(microbatch) + 1);
  }
}

Message GroupChannel::receive(int microbatch) {
  auto& place = places_[microbatch];
  place.received = true;
  const auto first = take(place.capacity, tag_of(microbatch));
  const auto* words = static_cast<const int64_t*>(first.const_data_ptr());
  if (words[kFailed] != 0) {
    throw PeerFailed();
  }
  const auto whole = words[kHeaderBytes] + words[kPayloadBytes];
  if (whole <= place.capacity) {
    return message_of(words, first.const_data_ptr<uint8_t>() + words[kHeaderBytes]);
  }
  place.capacity = whole;
  const auto payload = take(words[kPayloadBytes], tag_of(microbatch) + 1);
  return message_of(words, payload.const_data_ptr<uint8_t>());
}

void GroupChannel::send_failure(int microbatch) {
  auto& place = places_[microbatch];
  if (place.sent) {
    return;
  }
  const memory::Unlimited unlimited;
  auto first = bytes_of(place.capacity).zero_();
  *static_cast<int64_t*>(first.mutable_data_ptr()) = 1;
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
  }
}

void GroupChannel::reset(int microbatches) {
  TORCH_CHECK_VALUE(
      microbatches <= kMostMicrobatches,
      "there are too many microbatches for one step between processes (microbatches: ",
      microbatches, ", at most: ", kMostMicrobatches, ")");
  if (microbatches != std::ssize(places_)) {
    places_.assign(microbatches, {kFirstCapacity, false, false});
  }
  for (auto& place : places_) {
    place.sent = place.received = false;
  }
}

void GroupChannel::flush() noexcept {
  for (auto& [work, bytes] : under_way_) {
    try {
      work->wait();
    } catch (const std::exception&) {  // the ranks cannot agree on a verdict then, and say why
      break;
    }
  }
  under_way_.clear();
}

}  // namespace brimful::pipeline
