// Fragmentation distinguished from capacity, by the numbers of a refusal and by torch's message.
#include "step/remedy.h"
#include "support/catch.h"

#include <string>

namespace test_remedy {

using brimful::Refusal;
using brimful::refusal_in;
using brimful::Remedy;
using brimful::remedy_for;

namespace {
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

Refusal refusal(int64_t request, int64_t free, int64_t reserved, int64_t allocated) {
  return {request, free, reserved, allocated, std::nullopt};
}
}  // namespace

TEST_CASE("The cache is released only where its bytes are what is missing", "[step]") {
  CHECK(remedy_for(refusal(100, 0, 1000, 900)) == Remedy::release_cache);
  CHECK(remedy_for(refusal(101, 0, 1000, 900)) == Remedy::finer);
  CHECK(remedy_for(refusal(101, 1, 1000, 900)) == Remedy::release_cache);  // with what is left
  CHECK(remedy_for(refusal(100, 99, 1000, 1000)) == Remedy::finer);        // nothing is cached
  CHECK(remedy_for(refusal(100, 500, 1000, 1000)) == Remedy::finer);
  CHECK(remedy_for(refusal(100, 0, 0, 0)) == Remedy::finer);

  auto limited = refusal(100, 5000, 950, 900);
  limited.limit_bytes = 1000;
  CHECK(remedy_for(limited) == Remedy::release_cache);
  limited.limit_bytes = 999;  // the device has room that this process may not use
  CHECK(remedy_for(limited) == Remedy::finer);
  limited.limit_bytes = 900;  // cut below what is reserved
  CHECK(remedy_for(limited) == Remedy::finer);

  Refusal outside;  // a library's: the driver gets the cache back
  outside.reserved_bytes = 10;
  outside.allocated_bytes = 9;
  CHECK(remedy_for(outside) == Remedy::release_cache);
  outside.allocated_bytes = 10;
  CHECK(remedy_for(outside) == Remedy::finer);
}

TEST_CASE("Torch's message about a refusal is read", "[step]") {
  const std::string words =
      "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
      "which 512.00 MiB is free. Process 77 has 120.00 GiB memory in use. 16.00 GiB allowed; Of "
      "the "
      "allocated memory 12.25 GiB is allocated by PyTorch, with 64.00 KiB allocated in private "
      "pools (e.g., CUDA Graphs), and 3.00 GiB is reserved by PyTorch but unallocated. If reserved "
      "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF";
  const auto found = refusal_in(words);
  REQUIRE(found);
  CHECK(found->request_bytes == 2 * kGiB + kGiB / 2);
  CHECK(found->free_bytes == 512 * kMiB);
  CHECK(found->allocated_bytes == 12 * kGiB + kGiB / 4);
  CHECK(found->reserved_bytes == 15 * kGiB + kGiB / 4);
  CHECK(found->limit_bytes == 16 * kGiB);
  CHECK(remedy_for(*found) == Remedy::release_cache);

  const auto small = refusal_in(
      "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 8.00 GiB of "
      "which 512 bytes is free. Of the allocated memory 7.00 GiB is allocated by PyTorch, and 3.50 "
      "MiB is reserved by PyTorch but unallocated.");
  REQUIRE(small);
  CHECK(small->free_bytes == 512);
  CHECK_FALSE(small->limit_bytes);
  CHECK(small->reserved_bytes - small->allocated_bytes == 3 * kMiB + kMiB / 2);
  CHECK(remedy_for(*small) == Remedy::finer);
}

TEST_CASE("Another message is no refusal that could be read", "[step]") {
  for (const char* words :
       {"", "CUDA out of memory. Tried to allocate more than 1EB memory.",
        "CUDA out of memory. Tried to allocate 2.00 GiB", "CUDA out of memory. Tried to allocate",
        " is free is allocated by PyTorch",
        "CPU out of memory. Tried to allocate 8.0 KiB (limit: 4.0 KiB, used: 0 B, peak: 0 B).",
        "CUDA out of memory. Tried to allocate x GiB. y GiB is free. z is allocated by PyTorch, "
        "and GiB is reserved by PyTorch but unallocated.",
        "the loss is not a scalar"}) {
    CAPTURE(words);
    CHECK_FALSE(refusal_in(words));
  }
}

}  // namespace test_remedy
