#include <ATen/ATen.h>
#include "memory/tensor_bytes.h"
#include "support/catch.h"

namespace test_tensor_bytes {

using brimful::memory::bytes_of;

TEST_CASE("A tensor's bytes are those of its elements", "[memory]") {
  CHECK(bytes_of(at::Tensor()) == 0);
  CHECK(bytes_of(at::zeros({3, 4}, at::kHalf)) == 24);
  CHECK(bytes_of(at::zeros({4}, at::kFloat).expand({3, 4})) == 48);
  CHECK(bytes_of(at::zeros({0})) == 0);
}

TEST_CASE("A sparse tensor's bytes are those of its indices and values", "[memory]") {
  const auto dense = at::tensor({0.0F, 1.0F, 2.0F}).reshape({3, 1});
  CHECK(bytes_of(dense.to_sparse()) == 2 * 2 * 8 + 2 * 4);
}

}  // namespace test_tensor_bytes
