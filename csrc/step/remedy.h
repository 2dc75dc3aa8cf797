#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace brimful {

/// A device's memory when an allocation was refused.
struct Refusal {
  std::optional<int64_t>
      request_bytes;       ///< nothing: a library asked the driver, and did not say for how much
  int64_t free_bytes = 0;  ///< that the driver has left
  int64_t reserved_bytes = 0;          ///< held by torch's allocator
  int64_t allocated_bytes = 0;         ///< of these, by tensors
  std::optional<int64_t> limit_bytes;  ///< of reserved_bytes
};

/// What torch's CUDA allocator says of a refusal, exact to half a percent; nothing in any other message.
BRIMFUL_API std::optional<Refusal> refusal_in(std::string_view message);

enum class Remedy : uint8_t {
  finer,         ///< capacity is short: smaller pieces
  release_cache  ///< the bytes are there, in fragments or in torch's cache: the same again without them
};
BRIMFUL_API Remedy remedy_for(const Refusal& refusal);

/// True if the same work may fit when torch's cache on `device` is given back, by the message of what ran out and, where
/// they do not say it, by what the cache holds now.
BRIMFUL_API bool release_helps(const std::string& shortage, c10::Device device);

}  // namespace brimful
