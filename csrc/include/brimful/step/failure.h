#pragma once
#include <brimful/error.h>
#include <brimful/export.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// What a rank says to the others of how its part of a step ended.
struct Failure {
  int32_t rank = -1;    ///< -1: of no rank alone
  int32_t replica = 0;  ///< of a pipeline, that the rank is in
  int64_t step = -1;    ///< -1: outside of steps
  FailureKind kind = Status::error;
  std::string text;
};

/// Its text, behind "out of memory: " where that is its kind.
BRIMFUL_API std::string to_string(const Failure& failure);

/// With kind and text of `error`.
BRIMFUL_API Failure failure_of(const std::exception_ptr& error);

/// For other ranks, in at most `most_bytes`: a long text is cut.
/// @throws c10::ValueError if there is no room for a failure without a text
BRIMFUL_API std::vector<uint8_t> encode(const Failure& failure,
                                        size_t most_bytes = std::numeric_limits<uint32_t>::max());
/// Nothing if these are not the bytes of encode().
BRIMFUL_API std::optional<Failure> decode_failure(const std::vector<uint8_t>& bytes);

}  // namespace brimful
