#include <brimful/step/failure.h>
#include <brimful/step/oom.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "base/one_line.h"

namespace brimful {
namespace {
constexpr uint8_t kMark = 0xFA;  // of a failure's first byte

/// Layout: mark 1, kind 1, rank 4, replica 4, step 8, bytes of the text 4; the text follows. Returns the bytes so far.
template <typename FailureOrConst, typename Visit>
size_t visit_head(FailureOrConst& failure, uint8_t& mark, uint32_t& text_bytes,
                  const Visit& visit) {
  size_t offset = 0;
  const auto field = [&](auto& value) {
    visit(value, offset);
    offset += sizeof(value);
  };
  field(mark);
  field(failure.kind);
  field(failure.rank);
  field(failure.replica);
  field(failure.step);
  field(text_bytes);
  return offset;
}
constexpr size_t kHeadBytes = 1 + 1 + 4 + 4 + 8 + 4;
}  // namespace

std::string to_string(const Failure& failure) {
  return (failure.kind == Status::out_of_memory ? "out of memory: " : "") + failure.text;
}

Failure failure_of(const std::exception_ptr& error) {
  Failure failure;
  failure.kind = is_out_of_memory(error) ? Status::out_of_memory : Status::error;
  failure.text = to_string(error);
  return failure;
}

std::vector<uint8_t> encode(const Failure& failure, size_t most_bytes) {
  TORCH_CHECK_VALUE(most_bytes >= kHeadBytes, "a failure needs more room (most_bytes: ", most_bytes,
                    ", without its text: ", kHeadBytes, "); give it as much");
  auto mark = kMark;
  const auto whole = as_utf8(failure.text);
  const auto text = first_bytes(whole, most_bytes - kHeadBytes);
  auto text_bytes = static_cast<uint32_t>(text.size());
  std::vector<uint8_t> bytes(kHeadBytes + text_bytes);
  visit_head(failure, mark, text_bytes, [&](const auto& value, size_t offset) {
    std::memcpy(bytes.data() + offset, &value, sizeof(value));
  });
  std::copy_n(text.begin(), text_bytes, bytes.begin() + kHeadBytes);
  return bytes;
}

std::optional<Failure> decode_failure(const std::vector<uint8_t>& bytes) {
  if (bytes.size() < kHeadBytes) {
    return std::nullopt;
  }
  Failure failure;
  uint8_t mark = 0;
  uint32_t text_bytes = 0;
  visit_head(failure, mark, text_bytes, [&](auto& value, size_t offset) {
    std::memcpy(&value, bytes.data() + offset, sizeof(value));
  });
  if (mark != kMark || failure.kind > Status::error || bytes.size() - kHeadBytes != text_bytes) {
    return std::nullopt;
  }
  failure.text.assign(bytes.begin() + kHeadBytes, bytes.end());
  return failure;
}

}  // namespace brimful
