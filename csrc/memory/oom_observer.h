#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <cstdint>
#include <string>

namespace brimful::memory {

/// What there is to say about a refused request, as it stands: called by the thread whose request it is, without a lock.
using OomObserver = std::string (*)(c10::Device device, int64_t request_bytes, bool retried);

/// For as long as the process lives.
BRIMFUL_API void set_oom_observer(OomObserver observer) noexcept;

/// Asks it while tracking is on; empty where there is none, or where it fails. What it allocates passes every limit, and
/// is not asked about again.
std::string observe_oom(c10::Device device, int64_t request_bytes) noexcept;

/// Work that is repeated where memory runs out, in any thread: observers keep to what is cheap meanwhile. Nests.
class BRIMFUL_API RetryScope {
 public:
  RetryScope() noexcept;
  ~RetryScope();
  RetryScope(const RetryScope&) = delete;
  RetryScope& operator=(const RetryScope&) = delete;
};

}  // namespace brimful::memory
