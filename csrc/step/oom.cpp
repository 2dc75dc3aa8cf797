#include <brimful/error.h>
#include <brimful/step/oom.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>
#include <utility>

#include "base/one_line.h"
#include "memory/cuda.h"

namespace brimful {
namespace {
// What torch 2.11 to 2.15 and the libraries below it say when memory runs out outside the typed error.
constexpr std::array<std::string_view, 8> kAllocatorTexts{
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "would exceed allowed memory. (out of memory)",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
};
constexpr std::array<std::string_view, 12> kOutsideTexts{
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA ran out of memory outside PyTorch's allocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
};
// A handle or an engine that could not be made: for want of memory, or of a driver, or of support.
constexpr std::array<std::string_view, 8> kUnclearTexts{
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUSPARSE_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "FIND was unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
};
// The context is broken: every later call of the process fails too. torch appends the error's name to its message.
constexpr std::array<std::string_view, 14> kLostTexts{
    "NCCL",
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "unspecified launch failure",
    "misaligned address",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected",
    "cudaErrorContained",
    "cudaErrorDeviceUninitialized",
};
constexpr int64_t kShortBytes = int64_t{256} << 20;  // a library's handle and workspaces
constexpr int32_t kCudaErrorMemoryAllocation = 2;
constexpr size_t kMaxDescription = 2000;

// Of the innermost scope.
thread_local std::optional<c10::Device> device_of_scope;
thread_local std::optional<int64_t> refusals_before;

bool confirms(const MemoryEvidence& evidence) {
  return evidence.refused || (evidence.free_bytes && *evidence.free_bytes < kShortBytes);
}

std::atomic<detail::BindingErrorReader>& binding_error_reader() {
  static std::atomic<detail::BindingErrorReader> reader{nullptr};
  return reader;
}

std::optional<detail::BindingError> read_by_binding(const std::exception_ptr& error) {
  const auto reader = binding_error_reader().load();
  return reader != nullptr && error ? reader(error) : std::nullopt;
}

std::string own_text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

/// torch's allocator has refused, and asks NVML for its message how much is in use: on a slice of a GPU, or in a
/// container, NVML may not answer.
bool is_refusal_without_nvml(std::string_view message) {
  return message.find("NVML_SUCCESS == ") != std::string_view::npos &&
         message.find("CUDACachingAllocator") != std::string_view::npos;
}

template <typename Evidence>
bool is_shortage(Shortage shortage, const Evidence& evidence) {
  switch (shortage) {
    case Shortage::allocator:
    case Shortage::outside:
      return true;
    case Shortage::unclear:
      return confirms(evidence());
    case Shortage::none:
    case Shortage::lost:
      break;
  }
  return false;
}

template <typename Evidence>
bool is_out_of_memory_by(const std::exception_ptr& error, const Evidence& evidence) {
  if (const auto read = read_by_binding(error)) {
    return read->out_of_memory;
  }
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const RankFailed&) {  // speaks of another rank's memory
    return false;
  } catch (const c10::DistError&) {
    return false;
  } catch (const c10::AcceleratorError& e) {
    return e.get_error_code() == kCudaErrorMemoryAllocation ||
           is_shortage(shortage_in(e.what_without_backtrace()), evidence);
  } catch (const c10::Error& e) {
    return is_shortage(shortage_in(e.what_without_backtrace()), evidence);
  } catch (const std::runtime_error& e) {
    return is_shortage(shortage_in(e.what()), evidence);
  } catch (...) {
    return false;
  }
}
}  // namespace

Shortage shortage_in(std::string_view message) {
  const auto contains = [&](std::string_view text) {
    return message.find(text) != std::string_view::npos;
  };
  const auto any = [&](const auto& texts) {
    return std::any_of(texts.begin(), texts.end(), contains);
  };
  if (any(kLostTexts)) {
    return Shortage::lost;
  }
  if (any(kAllocatorTexts) || is_refusal_without_nvml(message) ||
      (contains("unable to mmap") && contains("Cannot allocate memory"))) {
    return Shortage::allocator;
  }
  return any(kOutsideTexts)   ? Shortage::outside
         : any(kUnclearTexts) ? Shortage::unclear
                              : Shortage::none;
}

MemoryEvidence memory_evidence() noexcept {
  const auto refusals = memory::cuda_refusals(device_of_scope);
  if (!refusals) {
    return {};
  }
  return {memory::cuda_free_bytes(device_of_scope),
          refusals_before && *refusals > *refusals_before};
}

EvidenceScope::EvidenceScope(std::optional<c10::Device> device) noexcept
    : outer_device_(device_of_scope), outer_refusals_(refusals_before) {
  device_of_scope = device && device->is_cuda() ? device : std::nullopt;
  refusals_before = memory::cuda_refusals(device_of_scope);
}

EvidenceScope::~EvidenceScope() {
  device_of_scope = outer_device_;
  refusals_before = outer_refusals_;
}

bool is_out_of_memory_message(std::string_view message) {
  return is_shortage(shortage_in(message), memory_evidence);
}

bool is_out_of_memory_message(std::string_view message, const MemoryEvidence& evidence) {
  return is_shortage(shortage_in(message), [&] { return evidence; });
}

void detail::set_binding_error_reader(BindingErrorReader reader) {
  binding_error_reader() = reader;
}

bool is_out_of_memory(const std::exception_ptr& error) {
  return is_out_of_memory_by(error, memory_evidence);
}

bool is_out_of_memory(const std::exception_ptr& error, const MemoryEvidence& evidence) {
  return is_out_of_memory_by(error, [&] { return evidence; });
}

std::string to_string(const std::exception_ptr& error) {
  std::string text;
  if (auto read = read_by_binding(error)) {
    text = std::move(read->text);
  } else {
    text = own_text_of(error);
  }
  text = as_utf8(text);
  text = first_bytes(std::string_view(text).substr(0, text.find("\n\n")), kMaxDescription);
  while (!text.empty() && text.back() == '\n') {
    text.pop_back();
  }
  return text;
}

}  // namespace brimful
