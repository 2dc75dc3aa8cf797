#include "sizer/gradient_sketch.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>

namespace brimful::detail {
namespace {
constexpr int64_t kBlock = 4096;
constexpr int64_t kBlocksAtOnce = 128;
constexpr int64_t kMostBlocks = int64_t{1} << 40;  // of a parameter

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

const at::Tensor& signs_of_block() {
  static const at::Tensor signs = [] {
    auto made = at::empty({kBlock, kProjections}, at::kDouble);
    auto* const value = made.mutable_data_ptr<double>();
    for (int64_t i = 0; i < made.numel(); ++i) {
      value[i] = (mixed(static_cast<uint64_t>(i)) & 1) != 0 ? 1 : -1;
    }
    return made;
  }();
  return signs;
}

/// For each number a row of signs.
at::Tensor signs_of(const at::Tensor& numbers) {
  const auto column = numbers.unsqueeze(1);
  std::vector<at::Tensor> columns;
  for (int64_t k = 0; k < kProjections; ++k) {
    const auto odd = static_cast<int64_t>(mixed(1000 + k) >> 1) | 1;
    auto bits = column * odd + static_cast<int64_t>(mixed(2000 + k) >> 1);
    bits = (bits.bitwise_xor(bits.__rshift__(31))) * odd;
    columns.push_back(bits.__rshift__(43).bitwise_and(1));
  }
  return at::cat(columns, 1).to(at::kDouble) * 2 - 1;
}
}  // namespace

void GradientSketch::add(int64_t parameter, const at::Tensor& gradient) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  if (!sums_.defined()) {
    const auto options = at::TensorOptions(gradient.device()).dtype(at::kDouble);
    sums_ = at::zeros({kProjections}, options);
    matrix_ = signs_of_block().to(options);
  }
  auto real = gradient.detach().to(sums_.device());
  if (real.is_sparse() && real.sparse_dim() == 1 && !real.is_complex()) {
    add_sparse(parameter, real.coalesce());
    return;
  }
  real = real.layout() == at::kStrided ? real : real.to_dense();
  add_dense(parameter, real.is_complex() ? at::view_as_real(real.resolve_conj()) : real);
}

void GradientSketch::add_blocks(const at::Tensor& blocks, const at::Tensor& numbers) {
  const auto projected = blocks.to(at::kDouble).matmul(matrix_.narrow(0, 0, blocks.size(1)));
  sums_ += (projected * signs_of(numbers)).sum(0);
}

void GradientSketch::add_dense(int64_t parameter, const at::Tensor& gradient) {
  const auto flat = gradient.reshape({-1});
  const auto blocks = flat.numel() / kBlock;
  const auto numbered = [&](int64_t begin, int64_t count) {
    return at::arange(begin, begin + count, sums_.options().dtype(at::kLong)) +
           parameter * kMostBlocks;
  };
  for (int64_t begin = 0; begin < blocks; begin += kBlocksAtOnce) {
    const auto count = std::min(kBlocksAtOnce, blocks - begin);
    add_blocks(flat.narrow(0, begin * kBlock, count * kBlock).view({count, kBlock}),
               numbered(begin, count));
  }
  if (const auto rest = flat.numel() - blocks * kBlock; rest > 0) {
    add_blocks(flat.narrow(0, blocks * kBlock, rest).view({1, rest}), numbered(blocks, 1));
  }
}

void GradientSketch::add_sparse(int64_t parameter, const at::Tensor& gradient) {
  const auto values = gradient.values();
  const auto rows = values.size(0);
  if (rows == 0) {
    return;
  }
  const auto flat = values.reshape({rows, -1});
  const auto numbers = gradient.indices()[0] + parameter * kMostBlocks;
  for (int64_t column = 0; column < flat.size(1); column += kBlock) {
    const auto width = std::min(kBlock, flat.size(1) - column);
    for (int64_t begin = 0; begin < rows; begin += kBlocksAtOnce) {
      const auto count = std::min(kBlocksAtOnce, rows - begin);
      add_blocks(flat.narrow(0, begin, count).narrow(1, column, width),
                 numbers.narrow(0, begin, count) + column * (kMostBlocks / kBlock / 2));
    }
  }
}

std::array<double, kProjections> GradientSketch::values() const {
  std::array<double, kProjections> found{};
  if (sums_.defined()) {
    const auto sums = sums_.cpu();
    std::copy_n(sums.const_data_ptr<double>(), kProjections, found.begin());
  }
  return found;
}

}  // namespace brimful::detail
