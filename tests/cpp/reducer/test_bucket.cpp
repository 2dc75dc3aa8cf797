#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"

#include "reducer/bucket.h"

#include <array>

namespace test_bucket {

using namespace brimful;

namespace {
BucketPlan::Bucket planned(const std::vector<at::Tensor>& parameters) {
  BucketPlan::Bucket bucket{{}, parameters[0].scalar_type(), parameters[0].device()};
  for (size_t i = 0; i < parameters.size(); ++i) {
    bucket.parameters.push_back(static_cast<int64_t>(parameters.size() - 1 - i));
  }
  return bucket;
}

BucketPlan plan_of(const std::vector<std::vector<int64_t>>& lists) {
  BucketPlan plan;
  for (const auto& list : lists) {
    plan.buckets.push_back({list, at::kFloat});
  }
  return plan;
}
}  // namespace

TEST_CASE("A bucket's slots are views with the shapes and strides of the parameters", "[reducer]") {
  const auto dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat);
  const std::vector<at::Tensor> parameters{
      at::zeros({3}, dtype),
      at::zeros({4, 5}, dtype).t(),
      at::zeros({}, dtype),
      at::zeros({2, 3, 2, 2}, dtype).contiguous(at::MemoryFormat::ChannelsLast),
      at::zeros({0}, dtype),
      at::zeros({3, 3}, dtype).slice(1, 0, 2)};
  Arenas arenas;
  const auto layout = arenas.carve({{planned(parameters)}}, 7, parameters);
  const auto& bucket = layout.buckets[0];
  const auto& slots = layout.slots;
  CHECK_FALSE(bucket.flat.is_complex());
  CHECK(bucket.flat.numel() == bucket.gradients.numel() + 7);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& view = slots[i].view;
    CHECK(view.sizes() == parameters[i].sizes());
    CHECK(view.scalar_type() == dtype);
    if (parameters[i].is_non_overlapping_and_dense()) {
      CHECK(view.strides() == parameters[i].strides());
    }
    CHECK(at::all(view == 0).item<bool>());  // no other slot overlaps this one
    view.fill_(static_cast<double>(i) + 1);
    const auto offset = reinterpret_cast<uintptr_t>(view.const_data_ptr()) -
                        reinterpret_cast<uintptr_t>(bucket.flat.const_data_ptr());
    CHECK((view.numel() == 0 || offset % 64 == 0));
  }
  CHECK(at::all(bucket.flat.narrow(0, bucket.gradients.numel(), 7) == 0).item<bool>());
}

TEST_CASE("Another plan is carved from the same memory, zeroed", "[reducer]") {
  const std::vector<at::Tensor> parameters{at::zeros({3}), at::zeros({40}), at::zeros({5, 5})};
  Arenas arenas;
  const auto first = arenas.carve(plan_of({{2, 1}, {0}}), 9, parameters);
  const auto* memory = first.buckets[0].flat.const_data_ptr();
  for (const auto& bucket : first.buckets) {
    bucket.flat.fill_(3);
  }
  const auto bytes = arenas.bytes();
  const auto second = arenas.carve(plan_of({{0}, {1}, {2}}), 9, parameters);
  CHECK(arenas.bytes() == bytes);
  CHECK(second.buckets[0].flat.const_data_ptr() == memory);
  for (const auto& bucket : second.buckets) {
    CHECK(at::all(bucket.flat == 0).item<bool>());
  }
  CHECK(second.buckets[2].flat.numel() - second.buckets[2].gradients.numel() == 9);
  CHECK(second.slots[2].view.sizes() == parameters[2].sizes());
  // With a bucket for the record alone the same dtype needs as much, or more for nothing: memory is made anew.
  const auto third = arenas.carve(plan_of({{0, 1, 2}, {}}), 1000, parameters);
  CHECK(third.buckets[1].gradients.numel() == 0);
  CHECK(third.buckets[1].flat.numel() == 1000);
}

TEST_CASE("A direct bucket has no memory of its own", "[reducer]") {
  const std::vector<at::Tensor> parameters{at::zeros({64}), at::zeros({8})};
  BucketPlan plan = plan_of({{0}, {1}});
  plan.buckets[0].direct = true;
  Arenas arenas;
  const auto layout = arenas.carve(plan, 0, parameters);
  CHECK_FALSE(layout.buckets[0].flat.defined());
  CHECK_FALSE(layout.slots[0].view.defined());
  CHECK(layout.slots[0].numel == 64);
  CHECK(arenas.bytes() == 64);
}

TEST_CASE("A tensor's elements are one row, whatever its strides", "[reducer]") {
  const auto image =
      at::arange(24, at::kFloat).view({1, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto row = as_row(image);
  CHECK(row.is_contiguous());
  CHECK(row.const_data_ptr() == image.const_data_ptr());
  CHECK(row.numel() == 24);
  CHECK(as_row(at::zeros({3, 2}, at::kComplexFloat)).numel() == 12);
}

TEST_CASE("A gradient is copied and scaled in one pass in every dtype and layout", "[reducer]") {
  const auto dtype = GENERATE(at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat,
                              at::kComplexDouble);
  const double scale = GENERATE(1.0, 0.5, 1.0 / 3);
  const int64_t rows = GENERATE(3, 20000);  // below and above where the own loop ends
  const auto values = at::arange(rows * 4, at::kDouble).remainder(13).sub(6).view({rows, 4});
  auto gradient = values.to(dtype);
  if (gradient.is_complex()) {
    gradient = gradient * c10::complex<double>(1, -2);
  }
  const auto expected = scale == 1 ? gradient : gradient * scale;
  const auto check = [&](const at::Tensor& view, const at::Tensor& from) {
    view.fill_(77);
    copy_scaled(view, from, scale);
    CHECK(at::equal(view, expected));
  };
  check(at::empty_like(gradient), gradient);
  check(at::empty_like(gradient), gradient.t().contiguous().t());
  check(at::empty({4, rows}, dtype).t(), gradient);
  check(at::empty_like(gradient), at::cat({gradient, gradient}, 1).slice(1, 0, 4));
  if (gradient.is_complex()) {
    check(at::empty_like(gradient), gradient.conj().resolve_conj().conj());
  } else {
    check(at::empty_like(gradient), gradient.clone()._neg_view().neg());
  }
}

TEST_CASE("A gradient of another dtype is converted", "[reducer]") {
  const auto view = at::empty({3}, at::kFloat);
  copy_scaled(view, at::full({3}, 3, at::kBFloat16), 0.5);
  CHECK(at::equal(view, at::full({3}, 1.5)));
}

TEST_CASE("Bytes are exact in every dtype that a bucket has", "[reducer]") {
  const auto dtype = GENERATE(at::kHalf, at::kBFloat16, at::kFloat, at::kDouble);
  std::array<uint8_t, 256> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(i);
  }
  const auto buffer = at::full({260}, 9, dtype);
  write_bytes(buffer, 2, bytes.data(), 256);
  const auto others = at::zeros({260}, dtype);
  std::array<uint8_t, 256> back{};
  read_bytes(others + buffer + others, 2, back.data(), 256);  // as a sum over ranks delivers them
  CHECK(back == bytes);
  CHECK(buffer[1].item<double>() == 9);
  CHECK(buffer[258].item<double>() == 9);
}

TEST_CASE("A sum above 255 reads as 255", "[reducer]") {
  uint8_t byte = 0;
  read_bytes(at::full({1}, 300, at::kFloat), 0, &byte, 1);  // of used flags, with many ranks
  CHECK(byte == 255);
}

TEST_CASE("A sparse bucket sends rows, whatever the gradient was", "[reducer]") {
  const auto values =
      at::tensor({0.0, 2.0, 0.0, 4.0}, at::kDouble).view({4, 1}).expand({4, 3}).contiguous();
  const auto parameter = at::zeros({4, 3}, at::kDouble);
  Arenas arenas;
  const auto layout =
      arenas.carve({{{{0}, at::kDouble, parameter.device(), true}}}, 0, {parameter});
  const auto& bucket = layout.buckets[0];
  CHECK_FALSE(bucket.flat.defined());
  CHECK_FALSE(layout.slots[0].view.defined());
  CHECK(bucket.sparse());
  CHECK(bucket.sparse_zero._nnz() == 0);
  for (const auto& gradient : {values, values.to_sparse(1), values.to_sparse(2)}) {
    const auto rows = sparse_scaled(gradient, 0.5);
    CHECK(rows.is_coalesced());
    CHECK(rows.sparse_dim() == bucket.sparse_zero.sparse_dim());
    CHECK(rows.dense_dim() == bucket.sparse_zero.dense_dim());
    CHECK(at::equal(rows.to_dense(), values * 0.5));
  }
}

}  // namespace test_bucket
