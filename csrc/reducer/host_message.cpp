#include "reducer/host_message.h"

#include <algorithm>
#include <cstring>

namespace brimful {
namespace {
constexpr size_t kSizesOffset = kRecordBytes;
constexpr size_t kMoreOffset = kSizesOffset + sizeof(uint64_t);
static_assert(kMoreOffset < kHostMessageBytes);
}  // namespace

std::vector<uint8_t> encode(const HostMessage& message) {
  std::vector<uint8_t> bytes(kHostMessageBytes);
  const auto record = encode(message.record);
  std::copy(record.begin(), record.end(), bytes.begin());
  std::memcpy(bytes.data() + kSizesOffset, &message.sizes, sizeof(message.sizes));
  bytes[kMoreOffset] = message.more ? 1 : 0;
  return bytes;
}

HostMessage decode_message(const std::vector<uint8_t>& bytes) {
  HostMessage message;
  message.record = decode_first(bytes);
  std::memcpy(&message.sizes, bytes.data() + kSizesOffset, sizeof(message.sizes));
  message.more = bytes[kMoreOffset] != 0;
  return message;
}

}  // namespace brimful
