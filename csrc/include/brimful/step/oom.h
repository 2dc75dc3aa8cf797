#pragma once
#include <brimful/export.h>

#include <exception>
#include <string>
#include <string_view>

namespace brimful {

/// True if `error` means that memory ran out and a smaller piece may fit: by its type (c10::OutOfMemoryError,
/// std::bad_alloc), then by its message. A failure of NCCL to allocate is not: its communicator is lost.
BRIMFUL_API bool is_out_of_memory(const std::exception_ptr& error);
/// The message part of the above, for errors that lost their type on the way.
BRIMFUL_API bool is_out_of_memory_message(std::string_view message);
/// The error's own words without a C++ backtrace, cut to one paragraph of at most 2000 characters.
BRIMFUL_API std::string describe(const std::exception_ptr& error);

}  // namespace brimful
