#include <c10/util/Exception.h>
#include "support/catch.h"

#include <brimful/error.h>
#include <brimful/step/oom.h>

#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace test_oom {

using brimful::is_out_of_memory;
using brimful::is_out_of_memory_message;
using brimful::MemoryEvidence;
using brimful::Shortage;
using brimful::shortage_in;
using brimful::to_string;

namespace {
template <typename Error>
std::exception_ptr error_of(const Error& error) {
  return std::make_exception_ptr(error);
}

std::exception_ptr thrown_by(void (*fn)()) {
  try {
    fn();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

struct Row {
  const char* text;
  Shortage shortage;
};

// Messages from research and from torch 2.15's libraries: one row for each kind.
const std::vector<Row> kTable{
    {"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", Shortage::allocator},
    {"CUDA out of memory. Tried to allocate more than 1EB memory.", Shortage::allocator},
    {"CUDA out of memory. Allocation was preemptively rejected because it would exceed "
     "per_process_memory_fraction limit. Requested size: 8.00 MiB",
     Shortage::allocator},
    {"Allocation on device 0 would exceed allowed memory. (out of memory)", Shortage::allocator},
    {"HIP out of memory. Tried to allocate 2.00 GiB", Shortage::allocator},
    {"XPU out of memory. Tried to allocate 2.00 GiB", Shortage::allocator},
    {"MPS backend out of memory (MPS allocated: 1 GB, max allowed: 2 GB).", Shortage::allocator},
    {"[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
     "you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)",
     Shortage::allocator},
    {"[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried",
     Shortage::allocator},
    {"std::bad_alloc", Shortage::allocator},
    {"unable to mmap 8 bytes from file </x>: Cannot allocate memory (12)", Shortage::allocator},
    {"NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"../c10/cuda/CUDACachingAllocator.cpp\":838",
     Shortage::allocator},
    {"NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
     "\"/pytorch/c10/cuda/CUDACachingAllocator.cpp\":1016, please report a bug to PyTorch.",
     Shortage::allocator},
    {"CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in", Shortage::outside},
    {"HIP error: out of memory", Shortage::outside},
    {"CUDA driver error: out of memory", Shortage::outside},
    {"Triton Error [CUDA]: out of memory", Shortage::outside},
    {"cuDNN SDPA execution failed: err 2 != CUDA_SUCCESS. CUDA ran out of memory outside "
     "PyTorch's allocator. If this workload",
     Shortage::outside},
    {"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     Shortage::outside},
    {"cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Shortage::outside},
    {"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", Shortage::outside},
    {"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", Shortage::outside},
    {"cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling", Shortage::outside},
    {"CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling", Shortage::outside},
    {"cuFFT error: CUFFT_ALLOC_FAILED", Shortage::outside},
    {"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
     Shortage::unclear},
    {"cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", Shortage::unclear},
    {"cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling", Shortage::unclear},
    {"CUDA error: CUSPARSE_STATUS_NOT_INITIALIZED when calling", Shortage::unclear},
    {"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if", Shortage::unclear},
    {"FIND was unable to find an engine to execute this computation", Shortage::unclear},
    {"GET was unable to find an engine to execute this computation", Shortage::unclear},
    {"Unable to find a valid cuDNN algorithm to run convolution", Shortage::unclear},
    {"NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'", Shortage::lost},
    {"NCCL WARN Failed to CUDA calloc 64 bytes, CUDA out of memory", Shortage::lost},
    {"CUDA error: device-side assert triggered", Shortage::lost},
    {"CUDA error: an illegal memory access was encountered", Shortage::lost},
    {"CUDA error: an illegal instruction was encountered", Shortage::lost},
    {"CUDA error: unspecified launch failure", Shortage::lost},
    {"CUDA error: misaligned address", Shortage::lost},
    {"CUDA error: invalid program counter", Shortage::lost},
    {"CUDA error: operation not supported on global/shared address space", Shortage::lost},
    {"CUDA error: hardware stack error", Shortage::lost},
    {"CUDA error: the launch timed out and was terminated", Shortage::lost},
    {"CUDA error: uncorrectable ECC error encountered", Shortage::lost},
    {"CUDA error: uncorrectable NVLink error detected during the execution", Shortage::lost},
    // A broken context answers every library's call with an error, some of which speak of memory.
    {"CUDA error: CUBLAS_STATUS_NOT_INITIALIZED; device-side assert triggered", Shortage::lost},
    {"CUDA out of memory; an illegal memory access was encountered", Shortage::lost},
    {"NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"../aten/src/ATen/cuda/PeerToPeer.cpp\":20",
     Shortage::none},
    {"CUDA error: invalid configuration argument", Shortage::none},
    {"Storage size calculation overflowed with sizes=[9, 9]", Shortage::none},
    {"out of resource: shared memory, Required: 8, Hardware limit: 4", Shortage::none},
    {"unable to mmap 8 bytes: Permission denied", Shortage::none},
    {"CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`", Shortage::none},
    {"CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling", Shortage::none},
    {"cuDNN error: CUDNN_STATUS_BAD_PARAM", Shortage::none},
    {"CUDA error: invalid device ordinal", Shortage::none},
    {"the loss is not a scalar", Shortage::none},
    {"", Shortage::none},
};

constexpr int64_t kMiB = int64_t{1} << 20;
const MemoryEvidence kUnknown{};
const MemoryEvidence kPlenty{300 * kMiB, false};
const MemoryEvidence kShort{200 * kMiB, false};
const MemoryEvidence kRefused{300 * kMiB, true};
}  // namespace

TEST_CASE("What an error's message says of memory", "[step]") {
  for (const auto& row : kTable) {
    CAPTURE(row.text);
    CHECK(shortage_in(row.text) == row.shortage);
    const bool certain = row.shortage == Shortage::allocator || row.shortage == Shortage::outside;
    const bool unclear = row.shortage == Shortage::unclear;
    // As torch's plain error, as Python's and as no error at all: the same answer.
    const auto typed = error_of(c10::Error({"f", "f", 0}, row.text));
    const auto plain = error_of(std::runtime_error(row.text));
    for (const auto& [evidence, confirmed] :
         {std::pair(kUnknown, false), {kPlenty, false}, {kShort, true}, {kRefused, true}}) {
      const bool expected = certain || (unclear && confirmed);
      CHECK(is_out_of_memory_message(row.text, evidence) == expected);
      CHECK(is_out_of_memory(typed, evidence) == expected);
      CHECK(is_out_of_memory(plain, evidence) == expected);
    }
  }
}

TEST_CASE("Torch's typed errors say more than their messages", "[step]") {
  const auto accelerator = [](int32_t code, const std::string& text) {
    return error_of(c10::AcceleratorError({"f", "f", 0}, code, text));
  };
  CHECK(is_out_of_memory(accelerator(2, "any words"), kPlenty));
  CHECK_FALSE(
      is_out_of_memory(accelerator(710, "CUDA error: device-side assert triggered"), kShort));
  CHECK_FALSE(is_out_of_memory(accelerator(700, "any words"), kShort));
  CHECK_FALSE(is_out_of_memory(error_of(c10::DistBackendError({"f", "f", 0}, "CUDA out of memory")),
                               kShort));
  // A peer's shortage has the peer's message, and is not this rank's own.
  CHECK_FALSE(is_out_of_memory(
      error_of(brimful::RankOutOfMemory(1, 2, "failed on rank 1: CUDA out of memory")), kShort));
  CHECK_FALSE(is_out_of_memory(
      error_of(brimful::RankFailed(1, 2, brimful::FailureKind::error, "std::bad_alloc")), kShort));
  CHECK(is_out_of_memory(error_of(c10::OutOfMemoryError({"f", "f", 0}, "any words")), kPlenty));
}

TEST_CASE("Without a CUDA device an unclear error is no shortage", "[step]") {
  const brimful::EvidenceScope scope;
  if (!brimful::memory_evidence().free_bytes) {
    CHECK_FALSE(brimful::memory_evidence().refused);
    CHECK_FALSE(is_out_of_memory_message("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"));
  }
}

TEST_CASE("Memory errors are known by their type", "[step]") {
  CHECK(is_out_of_memory(thrown_by([] { TORCH_CHECK_WITH(OutOfMemoryError, false, "anything"); })));
  CHECK(is_out_of_memory(error_of(std::bad_alloc())));
  CHECK(is_out_of_memory(error_of(brimful::BatchTooLarge("anything"))));
  CHECK_FALSE(is_out_of_memory(thrown_by([] { TORCH_CHECK_VALUE(false, "anything"); })));
  CHECK_FALSE(
      is_out_of_memory(error_of(std::logic_error("CUDA out of memory"))));  // no runtime error
  CHECK_FALSE(is_out_of_memory(error_of(7)));
  CHECK_FALSE(
      is_out_of_memory(error_of(brimful::RankOutOfMemory(1, 2, "rank 1 is out of memory"))));
}

TEST_CASE("Memory errors that lost their type are known by their text", "[step]") {
  CHECK(is_out_of_memory(
      error_of(std::runtime_error("CUDA out of memory. Tried to allocate 2 GiB"))));
  CHECK(is_out_of_memory(thrown_by(
      [] { TORCH_CHECK(false, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"); })));
  CHECK(is_out_of_memory_message(
      "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"));
  CHECK(is_out_of_memory_message(
      "RuntimeError: unable to mmap 8 bytes: Cannot allocate memory (12)"));
  CHECK_FALSE(is_out_of_memory_message("unable to mmap 8 bytes: Permission denied"));
  CHECK_FALSE(is_out_of_memory_message("NCCL error: unhandled cuda error, CUDA out of memory"));
  CHECK_FALSE(is_out_of_memory_message("the loss is not a scalar"));
  CHECK_FALSE(is_out_of_memory_message(""));
}

TEST_CASE("An error is described by its own message, short", "[step]") {
  CHECK(to_string(error_of(std::runtime_error("first\nsecond\n\nbacktrace"))) == "first\nsecond");
  CHECK(to_string(thrown_by([] { TORCH_CHECK_VALUE(false, "wrong (x: ", 3, ")"); })) ==
        "wrong (x: 3)");
  CHECK(to_string(error_of(std::runtime_error("ends\n"))) == "ends");
  CHECK(to_string(error_of(std::runtime_error(""))).empty());
  CHECK(to_string(error_of(7)) == "an exception that is no std::exception");
  CHECK(to_string(error_of(std::runtime_error(std::string(5000, 'x')))).size() == 2000);
}

TEST_CASE("An error's text is UTF-8, cut at a character", "[step]") {
  CHECK(to_string(error_of(std::runtime_error("caf\xe9.jpg"))) == "caf\\xe9.jpg");
  std::string text = "x";
  while (text.size() < 3000) {
    text += "\xe6\x96\x87";
  }
  CHECK(to_string(error_of(std::runtime_error(text))) == text.substr(0, 1999));  // of 2000
}

}  // namespace test_oom
