#include <brimful/step/oom.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <new>

namespace brimful {
namespace {
// What torch 2.11 to 2.15 and the libraries below it say when memory runs out outside the typed error.
constexpr std::array<std::string_view, 14> kOutOfMemoryTexts{
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA ran out of memory outside PyTorch's allocator",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "std::bad_alloc",
};
constexpr size_t kMaxDescription = 2000;
}  // namespace

bool is_out_of_memory_message(std::string_view message) {
  const auto contains = [&](std::string_view text) {
    return message.find(text) != std::string_view::npos;
  };
  if (contains("NCCL")) {
    return false;
  }
  return std::any_of(kOutOfMemoryTexts.begin(), kOutOfMemoryTexts.end(), contains) ||
         (contains("unable to mmap") && contains("Cannot allocate memory"));
}

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const c10::Error& e) {
    return is_out_of_memory_message(e.what_without_backtrace());
  } catch (const std::runtime_error& e) {
    return is_out_of_memory_message(e.what());
  } catch (...) {
    return false;
  }
}

std::string describe(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  } catch (...) {
    text = "an exception that is no std::exception";
  }
  text = text.substr(0, std::min(text.find("\n\n"), kMaxDescription));
  while (!text.empty() && text.back() == '\n') {
    text.pop_back();
  }
  return text;
}

}  // namespace brimful
