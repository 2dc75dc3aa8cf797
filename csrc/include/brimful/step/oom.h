#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace brimful {

/// What an error's text says about memory.
enum class Shortage : uint8_t {
  none,       ///< another error
  allocator,  ///< torch's allocator, or the system's, refused
  outside,    ///< a library or the driver found no memory beside torch's allocator
  unclear,    ///< `outside` if memory is short, else another error
  lost  ///< a sticky CUDA error, or a communicator: nothing on this device or group can be repeated
};
BRIMFUL_API Shortage shortage_in(std::string_view message);

/// What decides where the text leaves it open.
struct MemoryEvidence {
  std::optional<int64_t>
      free_bytes;        ///< of the CUDA device; nothing: not in use, or it no longer answers
  bool refused = false;  ///< torch's allocator refused a request in the same attempt
};
/// Of the innermost scope's CUDA device, else of this thread's current one. Waits for nothing; never throws.
BRIMFUL_API MemoryEvidence memory_evidence() noexcept;

/// Refusals by torch's CUDA allocator on the step's device count as evidence from here on, by default on this thread's
/// current one. Nests; destroy it on the same thread.
class BRIMFUL_API EvidenceScope {
 public:
  explicit EvidenceScope(std::optional<c10::Device> device = {}) noexcept;
  ~EvidenceScope();
  EvidenceScope(const EvidenceScope&) = delete;
  EvidenceScope& operator=(const EvidenceScope&) = delete;

 private:
  std::optional<c10::Device> outer_device_;
  std::optional<int64_t> outer_refusals_;
};

/// True if `error` means that memory ran out and a smaller piece may fit: by its type (c10::OutOfMemoryError,
/// std::bad_alloc), then by its message, then by the evidence, which is looked for only where it decides.
/// A failure of NCCL to allocate is not: its communicator is lost. A sticky CUDA error never is.
BRIMFUL_API bool is_out_of_memory(const std::exception_ptr& error);
BRIMFUL_API bool is_out_of_memory(const std::exception_ptr& error, const MemoryEvidence& evidence);
/// The message part of the above, for errors that lost their type on the way.
BRIMFUL_API bool is_out_of_memory_message(std::string_view message);
BRIMFUL_API bool is_out_of_memory_message(std::string_view message, const MemoryEvidence& evidence);
/// The error's own text without a C++ backtrace as UTF-8, cut to one paragraph of at most 2000 bytes; what is no UTF-8,
/// and NUL, is written as "\xff".
BRIMFUL_API std::string to_string(const std::exception_ptr& error);

namespace detail {
/// Of an error of another language, which crosses the core as an exception that only a binding can read.
struct BindingError {
  std::string text;
  bool out_of_memory = false;
};
/// Nothing for the core's own errors. It never throws, and takes out of the thread's state what the error has left there.
using BindingErrorReader = std::optional<BindingError> (*)(const std::exception_ptr& error);
BRIMFUL_API void set_binding_error_reader(BindingErrorReader reader);
}  // namespace detail

}  // namespace brimful
