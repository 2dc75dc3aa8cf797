#include "pipeline/transport/message_bytes.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/units.h"
#include "pipeline/transport/form_bytes.h"

namespace brimful::pipeline {
namespace {
constexpr int64_t kAlignment = 64;

/// Where a tensor's contents are.
enum Where : int64_t { kNowhere, kInside, kApart };

int64_t aligned(int64_t bytes) {
  return round_up(bytes, kAlignment);
}

/// The form, and names of what was stashed; most messages have neither.
std::string encode_form(const Message& message) {
  if (message.value.form == nullptr && message.stashed.empty()) {
    return {};
  }
  FormWriter writer;
  writer.put(static_cast<int64_t>(message.stashed.size()));
  for (const auto& name : message.stashed) {
    writer.put(std::string_view(name));
  }
  if (message.value.form != nullptr) {
    message.value.form->write(writer);
  }
  return writer.bytes();
}

void decode_form(std::string_view text, Message& message) {
  if (text.empty()) {
    return;
  }
  FormReader reader(text);
  for (auto left = reader.integer(); left > 0; --left) {
    message.stashed.push_back(reader.text());
  }
  if (!reader.done()) {
    message.value.form = make_form(reader);
  }
}
}  // namespace

PackedMessage::PackedMessage(const Message& message, int64_t place, int64_t rows)
    : message_(message), text_(encode_form(message)) {
  const auto& tensors = message.value.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!tensor.defined()) {
      words_.push_back(kNowhere);
      continue;
    }
    words_.push_back(tensor.is_cpu() ? kInside : kApart);
    words_.push_back(static_cast<int64_t>(tensor.scalar_type()));
    words_.push_back(i < message.needs_gradient.size() ? message.needs_gradient[i] : 0);
    words_.push_back(tensor.dim());
    words_.append(tensor.sizes().begin(), tensor.sizes().end());
    if (tensor.is_cpu()) {
      head_.payload_bytes += aligned(static_cast<int64_t>(tensor.nbytes()));
    }
  }
  head_.place = place;
  head_.rows = rows;
  head_.tensors = std::ssize(tensors);
  head_.text_bytes = std::ssize(text_);
  head_.header_bytes = aligned(
      static_cast<int64_t>(sizeof(MessageHead) + words_.size() * sizeof(int64_t) + text_.size()));
}

void PackedMessage::write(uint8_t* to) const {
  auto* payload = to + head_.header_bytes;
  std::memcpy(to, &head_, sizeof(MessageHead));
  to += sizeof(MessageHead);
  std::memcpy(to, words_.data(), words_.size() * sizeof(int64_t));
  std::memcpy(to + words_.size() * sizeof(int64_t), text_.data(), text_.size());
  for (const auto& tensor : message_.value.tensors) {
    if (tensor.defined() && tensor.is_cpu()) {
      const auto dense = tensor.contiguous().resolve_conj().resolve_neg();
      std::memcpy(payload, dense.const_data_ptr(), dense.nbytes());
      payload += aligned(static_cast<int64_t>(dense.nbytes()));
    }
  }
}

MessageHead head_of(const at::Tensor& bytes) {
  MessageHead head;
  std::memcpy(&head, bytes.const_data_ptr(), sizeof(head));
  return head;
}

Message read_message(const at::Tensor& bytes, MakeApart make_apart) {
  const auto head = head_of(bytes);
  const auto* const begin = bytes.const_data_ptr<uint8_t>();
  const auto* payload = begin + head.header_bytes;
  const auto* words = reinterpret_cast<const int64_t*>(begin + sizeof(MessageHead));
  Message message;
  message.value.tensors.reserve(head.tensors);
  message.needs_gradient.reserve(head.tensors);
  for (int64_t i = 0; i < head.tensors; ++i) {
    const auto where = *words++;
    if (where == kNowhere) {
      message.value.tensors.emplace_back();
      message.needs_gradient.push_back(0);
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(*words++);
    message.needs_gradient.push_back(static_cast<char>(*words++));
    const int64_t dims = *words++;
    const at::IntArrayRef sizes(words, dims);
    words += dims;
    if (where == kApart) {
      message.value.tensors.push_back(make_apart(sizes, dtype));
      continue;
    }
    auto tensor = at::empty(sizes, dtype);
    std::memcpy(tensor.mutable_data_ptr(), payload, tensor.nbytes());
    payload += aligned(static_cast<int64_t>(tensor.nbytes()));
    message.value.tensors.push_back(std::move(tensor));
  }
  decode_form({reinterpret_cast<const char*>(words), static_cast<size_t>(head.text_bytes)},
              message);
  return message;
}

Message read_message(const at::Tensor& bytes) {
  return read_message(bytes, [](at::IntArrayRef /*sizes*/, at::ScalarType dtype) -> at::Tensor {
    TORCH_CHECK_TYPE(false, "a tensor of a device came to a stage on the CPU (dtype: ", dtype, ")");
  });
}

MessageHead failure_at(int64_t place) {
  MessageHead head;
  head.failed = 1;
  head.place = place;
  return head;
}

void require_plain(const Message& message, c10::Device device) {
  for (const auto& tensor : message.value.tensors) {
    TORCH_CHECK_TYPE(
        !tensor.defined() || ((tensor.is_cpu() || tensor.device() == device) &&
                              tensor.layout() == at::kStrided && !tensor.is_quantized()),
        "tensors in messages between processes are dense, and on the CPU or their stage's device "
        "(device: ",
        tensor.device(), ", stage: ", device, ", layout: ", tensor.layout(),
        ", dtype: ", tensor.scalar_type(), "); convert them in the stage");
  }
}

}  // namespace brimful::pipeline
