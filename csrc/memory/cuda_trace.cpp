// torch's CUDA allocator reports each request under its lock: nothing may be asked of it under a lock that is taken here.
#include <c10/cuda/CUDACachingAllocator.h>
#include <algorithm>
#include <atomic>
#include <mutex>
#include "memory/cuda.h"
#include "memory/cuda_caching.h"

namespace brimful::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Entry = caching::TraceEntry;
using Kind = CachingRequest::Kind;

struct Scopes {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<CudaTraceScope*> all;
};

Scopes& scopes() {
  static auto* const all = new Scopes;  // for ever, as what calls back
  return *all;
}

std::optional<Kind> kind_of(const Entry& entry) {
  switch (entry.action_) {
    case Entry::ALLOC:
      return Kind::take;
    case Entry::FREE_REQUESTED:
      return Kind::give_back_pending;
    case Entry::FREE_COMPLETED:
      return Kind::complete;
    default:
      return std::nullopt;
  }
}

void on_request(const Entry& entry) noexcept {
  const auto kind = scopes().any.load(std::memory_order_relaxed) ? kind_of(entry) : std::nullopt;
  if (!kind) {
    return;
  }
  const std::lock_guard lock(scopes().mutex);
  for (auto* const scope : scopes().all) {
    if (scope->index() == entry.device_) {
      scope->note({*kind, entry.addr_, static_cast<int64_t>(entry.size_),
                   reinterpret_cast<uint64_t>(entry.stream_)});
    }
  }
}

}  // namespace

CudaTraceScope::CudaTraceScope(c10::Device device) : index_(checked_cuda_index(device)) {
  static const bool attached = [] {  // can be asked to begin, and never to end
    caching::attachAllocatorTraceTracker(&on_request);
    return true;
  }();
  const std::lock_guard lock(scopes().mutex);
  scopes().all.push_back(this);
  scopes().any.store(attached, std::memory_order_relaxed);
}

CudaTraceScope::~CudaTraceScope() {
  const std::lock_guard lock(scopes().mutex);
  std::erase(scopes().all, this);
  scopes().any.store(!scopes().all.empty(), std::memory_order_relaxed);
}

void CudaTraceScope::note(const CachingRequest& request) {
  if (request.kind == Kind::complete && !requests_.empty() &&
      requests_.back().kind == Kind::give_back_pending && requests_.back().block == request.block) {
    requests_.back().kind = Kind::give_back;  // at once: no other stream has used it
    return;
  }
  requests_.push_back(request);
}

std::vector<CachingRequest> CudaTraceScope::requests() const {
  const std::lock_guard lock(scopes().mutex);
  return requests_;
}

size_t CudaTraceScope::size() const {
  const std::lock_guard lock(scopes().mutex);
  return requests_.size();
}

}  // namespace brimful::memory
