#include <c10/util/Exception.h>
#include "support/catch.h"

#include <brimful/error.h>
#include <brimful/step/oom.h>

#include <new>
#include <stdexcept>

using brimful::describe;
using brimful::is_out_of_memory;
using brimful::is_out_of_memory_message;

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
}  // namespace

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

TEST_CASE("An error is described in its own words, short", "[step]") {
  CHECK(describe(error_of(std::runtime_error("first\nsecond\n\nbacktrace"))) == "first\nsecond");
  CHECK(describe(thrown_by([] { TORCH_CHECK_VALUE(false, "wrong (x: ", 3, ")"); })) ==
        "wrong (x: 3)");
  CHECK(describe(error_of(std::runtime_error("ends\n"))) == "ends");
  CHECK(describe(error_of(std::runtime_error(""))).empty());
  CHECK(describe(error_of(7)) == "an exception that is no std::exception");
  CHECK(describe(error_of(std::runtime_error(std::string(5000, 'x')))).size() == 2000);
}
