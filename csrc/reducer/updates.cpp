#include "reducer/updates.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "base/format.h"

namespace brimful {
namespace {
constexpr int64_t kValues = 16;  // of a watched parameter
constexpr size_t kMostWatched = std::tuple_size_v<decltype(ControlRecord::updated)>;

/// Of numbers in memory that may be read: no tensor whose operators are Python's.
bool has_values(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python) &&
         (c10::isFloatingType(type) || c10::isComplexType(type));
}

bool can_watch(const at::Tensor& tensor, c10::Device device) {
  return has_values(tensor) && tensor.device() == device && tensor.is_non_overlapping_and_dense() &&
         c10::elementSize(tensor.scalar_type()) > 1;
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.detach()) : tensor.detach();
}

/// Spread over the whole tensor.
at::Tensor values_of(const at::Tensor& parameter) {
  const auto real = as_real(parameter);
  return real.as_strided({kValues}, {(real.numel() - 1) / (kValues - 1)});
}

/// Of all bits.
uint64_t checksum(const std::vector<at::Tensor>& parameters) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  const auto integer_of = [](const at::Tensor& tensor) {
    switch (tensor.element_size()) {
      case 1:
        return at::kChar;
      case 2:
        return at::kShort;
      case 4:
        return at::kInt;
      default:
        return at::kLong;
    }
  };
  uint64_t sum = 0;
  for (const auto& parameter : parameters) {
    if (has_values(parameter)) {
      const auto real = as_real(parameter);
      const auto bits = real.view(integer_of(real));
      sum = sum * kGolden + static_cast<uint64_t>(bits.sum(at::kLong).item<int64_t>());
    }
  }
  return sum;
}

std::string ranks_in_words(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + format_list(ranks);
}

std::string how_they_differ(const std::vector<ControlRecord>& records, std::string& updated_on) {
  updated_on.clear();
  std::vector<int> idle;
  std::vector<int> updated;
  for (int rank = 0; rank < std::ssize(records); ++rank) {
    (records[rank].updated == decltype(ControlRecord::updated){} ? idle : updated).push_back(rank);
  }
  if (!idle.empty() && !updated.empty()) {
    updated_on = " (" + ranks_in_words(updated) + ")";
    return ranks_in_words(updated) + " updated them after the step before, and " +
           ranks_in_words(idle) + " did not";
  }
  return "after the step before the ranks updated different parameters, as if an optimizer had "
         "failed in the middle of its step";
}
}  // namespace

Updates::Updates(std::vector<at::Tensor> parameters, c10::Device device,
                 const std::vector<bool>& renormalised)
    : parameters_(std::move(parameters)), device_(device) {
  std::vector<size_t> fit;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (can_watch(parameters_[i], device) && !(i < renormalised.size() && renormalised[i])) {
      fit.push_back(i);
    }
  }
  const auto count = std::min(fit.size(), kMostWatched);
  for (size_t i = 0; i < count; ++i) {  // the first and the last one too
    watched_.push_back(fit[count == 1 ? 0 : i * (fit.size() - 1) / (count - 1)]);
  }
  if (count == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  values.reserve(watched_.size());
  for (const auto i : watched_) {
    values.push_back(values_of(parameters_[i]));
  }
  seen_ = at::cat(values);
  before_ = at::empty_like(seen_);
  differs_ = at::empty_like(seen_, seen_.options().dtype(at::kBool));
  updated_ = at::empty({static_cast<int64_t>(count)}, differs_.options());
}

at::Tensor Updates::look() {
  looked_ = std::all_of(watched_.begin(), watched_.end(),
                        [&](size_t i) { return can_watch(parameters_[i], device_); }) &&
            !watched_.empty();
  if (!looked_) {
    return {};
  }
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  values.reserve(watched_.size());
  for (const auto i : watched_) {
    values.push_back(values_of(parameters_[i]));
  }
  at::cat_out(seen_, values);
  if (!can_compare_) {
    return {};
  }
  at::ne_out(differs_, seen_, before_);
  at::any_out(updated_, differs_.view({updated_.numel(), kValues}), 1);
  return updated_;
}

void Updates::settle(const std::vector<ControlRecord>& records, const Exchange& exchange) {
  if (divergence_.empty() && updated_alike(records)) {
    std::swap(seen_, before_);
    can_compare_ = looked_;
    return;
  }
  if (divergence_.empty()) {
    how_ = how_they_differ(records, updated_on_);
  }
  ControlRecord own;
  {
    const memory::Unlimited unlimited;
    const at::NoGradGuard no_grad;
    own.next_weight = std::bit_cast<double>(checksum(parameters_));
  }
  const auto all = exchange(own);
  std::vector<int> others;
  for (int rank = 0; rank < std::ssize(all); ++rank) {
    if (std::bit_cast<uint64_t>(all[rank].next_weight) !=
        std::bit_cast<uint64_t>(all[0].next_weight)) {
      others.push_back(rank);
    }
  }
  if (others.empty()) {  // updated in another way, such as by a broadcast
    forget();
    return;
  }
  divergence_ = "the ranks' parameters differ: " + how_ +
                " (ranks that differ from rank 0: " + format_list(others) +
                "); load a checkpoint on every rank, or give all ranks the parameters and the "
                "optimizer's state of one that updated them" +
                updated_on_;
}

void Updates::forget() {
  can_compare_ = false;
  how_.clear();
  divergence_.clear();
}

}  // namespace brimful
