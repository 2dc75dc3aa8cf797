#include "reducer/updates.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <bit>
#include <numeric>
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

/// Values of a gradient at the places of values_of(); a gradient of rows is 1 at its rows. Undefined where there are none.
at::Tensor gradient_of(const at::Tensor& parameter, const at::TensorOptions& as) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined() || gradient.device() != parameter.device()) {
    return {};
  }
  if (gradient.layout() == at::kStrided) {
    const bool alike = has_values(gradient) && gradient.strides() == parameter.strides() &&
                       gradient.is_complex() == parameter.is_complex();
    return alike ? values_of(gradient) : at::Tensor();
  }
  if (!gradient.is_sparse() || gradient.sparse_dim() != 1 || !parameter.is_contiguous()) {
    return {};
  }
  const auto real = as_real(parameter);
  const auto stride = (real.numel() - 1) / (kValues - 1);
  const auto places = at::arange(kValues, gradient._indices().options()).mul_(stride);
  const auto rows = places.floor_divide_(std::max<int64_t>(real.numel() / real.size(0), 1));
  return rows.unsqueeze(1).eq(gradient._indices()).any(1).to(as);
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
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
    const auto& of = records[rank].updated;
    const bool any = std::find(of.begin(), of.end(), kUpdated) != of.end();
    (any ? updated : idle).push_back(rank);
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
                 const std::vector<bool>& renormalised, std::string owner)
    : parameters_(std::move(parameters)), device_(device), owner_(std::move(owner)) {
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
  no_values_ = at::zeros({kValues}, values[0].options());
  make_moments(2);
  differs_ = at::empty_like(now().values, no_values_.options().dtype(at::kBool));
  changed_ = at::empty({static_cast<int64_t>(count)}, differs_.options());
  idle_ = at::empty_like(changed_);
  updated_ = at::empty_like(changed_, changed_.options().dtype(at::kByte));
}

void Updates::make_moments(size_t count) {
  moments_.resize(count);
  const auto numel = static_cast<int64_t>(watched_.size()) * kValues;
  for (auto& moment : moments_) {
    moment.values = at::zeros({numel}, no_values_.options());
    moment.gradients = at::zeros_like(moment.values);
    moment.versions.resize(watched_.size());
  }
}

void Updates::be_late() {
  if (!watched_.empty()) {
    const at::NoGradGuard no_grad;
    make_moments(LateFlags::kLongest + 2);
    late_.emplace(device_, watched_.size());
  }
}

at::Tensor Updates::look(std::array<uint8_t, 8>& flags) {
  auto updated = compare();
  if (!late_) {
    return updated;
  }
  flags = late_->of_last_steps(stood_);
  late_->note(stood_, updated);
  return {};
}

at::Tensor Updates::compare() {
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
  for (size_t i = 0; i < watched_.size(); ++i) {
    values.push_back(values_of(parameters_[watched_[i]]));
    now().versions[i] = version_of(parameters_[watched_[i]]);
  }
  at::cat_out(now().values, values);
  if (!can_compare_) {
    return {};
  }
  at::ne_out(differs_, now().values, before().values);
  at::any_out(changed_, differs_.view({changed_.numel(), kValues}), 1);
  updated_.fill_(kUpdateUnknown);
  mark_idle();
  updated_.masked_fill_(changed_, kUpdated);
  return updated_;
}

/// Where a parameter's values should be others: it got a gradient there, and its counter says nothing of another write.
void Updates::mark_idle() {
  const auto written = [&](size_t i) { return now().versions[i] != before().versions[i]; };
  std::vector<size_t> all(watched_.size());
  std::iota(all.begin(), all.end(), 0);
  if (!before().gradients_known || std::all_of(all.begin(), all.end(), written)) {
    return;
  }
  at::ne_out(differs_, before().gradients, at::Scalar(0));
  at::any_out(idle_, differs_.view({idle_.numel(), kValues}), 1);
  for (const auto i : all) {
    if (written(i)) {
      idle_.select(0, static_cast<int64_t>(i)).zero_();
    }
  }
  updated_.masked_fill_(idle_, kNotUpdated);
}

void Updates::note_gradients() {
  if (!can_compare_) {
    return;
  }
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  values.reserve(watched_.size());
  for (const auto i : watched_) {
    auto gradient = gradient_of(parameters_[i], no_values_.options());
    values.push_back(gradient.defined() ? std::move(gradient) : no_values_);
  }
  at::cat_out(before().gradients, values);
  before().gradients_known = true;
}

uint64_t Updates::premises(int64_t step) {
  const auto& premise = at_step(step - 1 + std::ssize(moments_));
  return premise.gradients_known ? checksum({premise.values, premise.gradients}) : 0;
}

void Updates::settle(const std::vector<ControlRecord>& records, const Exchange& exchange) {
  if (late_) {
    const auto differing = late_->settle(records, stood_);
    if (divergence_.empty() && !differing) {
      take_looked();
    } else {
      compare_all(differing ? differing->records : records,
                  differing ? std::optional(differing->step) : std::nullopt, exchange);
    }
  } else if (divergence_.empty() && updated_alike(records)) {
    take_looked();
  } else {
    compare_all(records, stood_, exchange);
  }
}

void Updates::compare_all(const std::vector<ControlRecord>& records, std::optional<int64_t> step,
                          const Exchange& exchange) {
  ControlRecord own;
  {
    const memory::Unlimited unlimited;
    const at::NoGradGuard no_grad;
    own.next_weight = std::bit_cast<double>(checksum(parameters_));
    own.weight = std::bit_cast<double>(step ? premises(*step) : uint64_t{0});
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
  if (divergence_.empty()) {
    const auto premise = std::bit_cast<uint64_t>(all[0].weight);
    if (premise == 0 || !std::all_of(all.begin(), all.end(), [&](const auto& record) {
          return std::bit_cast<uint64_t>(record.weight) == premise;
        })) {  // they differed before, or had other gradients: on purpose
      take_looked();
      return;
    }
    how_ = how_they_differ(records, updated_on_);
  }
  divergence_ = "the ranks' parameters differ: " + how_ +
                " (ranks that differ from rank 0: " + format_list(others) +
                "); load a checkpoint on every rank, or give all ranks the parameters and the "
                "optimizer's state of one that updated them" +
                updated_on_ +
                "; where they differ on purpose (local SGD, weights that each rank perturbs), pass "
                "check_updates=False to " +
                owner_;
}

void Updates::take_looked() {
  now().gradients_known = false;
  ++stood_;
  can_compare_ = looked_;
}

void Updates::forget() {
  can_compare_ = false;
  if (late_) {
    late_->forget();
  }
  how_.clear();
  divergence_.clear();
}

}  // namespace brimful
