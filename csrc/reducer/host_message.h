#pragma once
#include <brimful/step/control_record.h>

#include <cstdint>
#include <vector>

namespace brimful {

/// What a rank sends to all hosts at the end of an attempt: its control record, and of its tail's head what is known then.
struct HostMessage {
  ControlRecord record;
  uint64_t sizes = 0;  ///< number of its buffers' sizes
  bool more = false;   ///< the rest of its head follows, and so does that of all other ranks
};

constexpr int64_t kHostMessageBytes = 64;
std::vector<uint8_t> encode(const HostMessage& message);
HostMessage decode_message(const std::vector<uint8_t>& bytes);

}  // namespace brimful
