#include <c10/util/Exception.h>
#include "memory/cuda.h"
#include "memory/cuda_caching.h"

namespace brimful::memory {
namespace {

[[noreturn]] void refuse(c10::Device device) {
  TORCH_CHECK_VALUE(false, "this build of brimful has no CUDA (device: ", device,
                    "); use device cpu, or build it against a CUDA torch with CUDA's headers");
}

[[noreturn]] void refuse(c10::DeviceIndex index) {
  refuse(c10::Device(c10::DeviceType::CUDA, index));
}

}  // namespace

c10::DeviceIndex checked_cuda_index(c10::Device device) {
  refuse(device);
}

CudaCounters cuda_counters(c10::DeviceIndex index) {
  refuse(index);
}

void cuda_lower_watermark(c10::DeviceIndex index) {
  refuse(index);
}

void cuda_set_limit(c10::DeviceIndex index, std::optional<int64_t> /*bytes*/,
                    std::optional<CudaLimit>& /*limit*/) {
  refuse(index);
}

std::optional<int64_t> cuda_limit(c10::DeviceIndex index,
                                  const std::optional<CudaLimit>& /*limit*/) {
  refuse(index);
}

void cuda_release_cached(c10::DeviceIndex index) {
  refuse(index);
}

CudaMemory cuda_memory(c10::DeviceIndex index) {
  refuse(index);
}

std::optional<int64_t> cuda_refusals(MaybeDevice /*device*/) noexcept {
  return std::nullopt;
}

std::optional<int64_t> cuda_free_bytes(MaybeDevice /*device*/) noexcept {
  return std::nullopt;
}

std::optional<int64_t> cuda_recent_free_bytes() noexcept {
  return std::nullopt;
}

std::optional<int> cuda_compute_major() noexcept {
  return std::nullopt;
}

bool cuda_follow(uint32_t /*session*/) {
  return true;
}

int64_t cuda_followed_bytes(c10::DeviceIndex index) {
  refuse(index);
}

std::optional<std::string> cuda_refusal() {
  return std::nullopt;
}

std::vector<CudaSegment> cuda_segments(c10::DeviceIndex index) {
  refuse(index);
}

std::vector<CudaWorkspace> cuda_workspaces(c10::Device /*device*/) {
  return {};
}

bool has_cuda_pool() {
  return false;
}

std::optional<CudaPool> cuda_pool(c10::Device device) {
  refuse(device);
}

CudaTraceScope::CudaTraceScope(c10::Device device) : index_(device.index()) {
  refuse(device);
}

CudaTraceScope::~CudaTraceScope() = default;

std::vector<CachingRequest> CudaTraceScope::requests() const {
  return requests_;
}

size_t CudaTraceScope::size() const {
  return requests_.size();
}

void CudaTraceScope::note(const CachingRequest& /*request*/) {}

std::optional<bool> cuda_is_capturing(c10::Device /*device*/) noexcept {
  return false;
}

std::vector<std::string> cuda_uuids() noexcept {
  return {};
}

}  // namespace brimful::memory
