// The first pass of a step over pairs, what the ranks gather, and the second pass. The loss: pair_loss.cpp.
#include "sizer/pair_run.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "sizer/pair_graph.h"
#include "step/meet.h"

namespace brimful {
namespace {
constexpr double kSameInHalf = 0.05;  // embeddings of two passes: kernels may differ by grad mode
constexpr double kSame = 1e-3;
constexpr double kAlikeInHalf = 1e-2;  // losses of two ranks
constexpr double kAlike = 1e-4;
}  // namespace

void PairRun::begin_attempt(const std::vector<int64_t>& split) {
  split_ = split;
  states_.clear();
  form_ = {};
  own_.clear();
  meeting_ = {};
  stage_ = Stage::alone;
  in_loss_ = false;
  waited_ = {};
  values_.clear();
  value_.reset();
  seeds_.clear();
  beside_ = {};
  next_piece_ = 0;
}

bool PairRun::run() {
  embed_all();
  if (!meet()) {
    return false;
  }
  const auto rows = meeting_.rows_of(around_.group.rank());
  {
    const auto all = gather();
    if (rows > 0) {
      in_loss_ = true;
      differentiate(all);
      in_loss_ = false;
    }
  }
  share_gradients();
  if (!around_.checks) {
    own_.clear();
  }
  around_.transaction.rewind();
  around_.batch.restore();
  return true;
}

bool PairRun::shares_gradients() const {
  return work_.options.own && work_.options.gathered_gradient && around_.group.world_size() > 1;
}

void PairRun::leave(Status verdict) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  if (stage_ == Stage::alone) {
    stage_ = Stage::done;
    meet_ranks(around_.group, pairs::Meeting::record_of(verdict, 0, {}, 0));
    return;
  }
  if (stage_ == Stage::met) {
    gather();
  }
  if (stage_ == Stage::gathered) {
    seeds_.clear();  // whatever they are: the others do not keep the sum
    share_gradients();
  }
}

template <typename Collective>
auto PairRun::timed(const Collective& collective) {
  const auto began = std::chrono::steady_clock::now();
  const auto count =
      c10::make_scope_exit([&] { waited_ += std::chrono::steady_clock::now() - began; });
  return collective();
}

Towers PairRun::embed(int64_t begin, int64_t end) {
  auto towers = work_.embed(begin, end);
  auto form = pairs::Form::of(towers, end - begin);
  TORCH_CHECK_VALUE(form_.towers.empty() || form == form_,
                    "the pieces' embeddings differ in shape or dtype (", form_.text(),
                    ", now: ", form.text(),
                    "); return the same towers from embed_fn for every piece");
  form_ = std::move(form);
  return towers;
}

void PairRun::embed_all() {
  const at::NoGradGuard no_grad;
  // Casts of parameters that were made here have no graph, and the second pass would find them.
  const auto forget_casts = c10::make_scope_exit([] { at::autocast::clear_cache(); });
  const auto rows = std::accumulate(split_.begin(), split_.end(), int64_t{0});
  int64_t begin = 0;
  for (const auto size : split_) {
    auto& states = states_.emplace_back();
    states.emplace_back(c10::Device(at::kCPU), ladder::generator_state(c10::Device(at::kCPU)));
    if (!around_.device.is_cpu()) {
      states.emplace_back(around_.device, ladder::generator_state(around_.device));
    }
    const auto towers = embed(begin, begin + size);
    for (size_t i = 0; i < towers.size(); ++i) {
      if (begin == 0) {
        auto sizes = towers[i].sizes().vec();
        sizes[0] = rows;
        own_.push_back(at::empty(sizes, towers[i].options().memory_format(std::nullopt)));
      }
      own_[i].narrow(0, begin, size).copy_(towers[i]);
    }
    begin += size;
  }
}

int64_t PairRun::bad_rows() const {
  const bool waits = around_.group.world_size() == 1 && !around_.device.is_cpu();
  if (scales() || waits) {
    return 0;  // the scaler looks at gradients; alone on a device the loss shows it behind the step
  }
  at::Tensor bad;
  for (size_t i = 0; i < own_.size(); ++i) {
    if (form_.towers[i].trains() && own_[i].numel() > 0) {
      const auto of_tower =
          at::isfinite(own_[i]).reshape({own_[i].size(0), -1}).all(1).logical_not();
      bad = bad.defined() ? bad.logical_or(of_tower) : of_tower;
    }
  }
  return bad.defined() ? bad.sum().item<int64_t>() : 0;
}

bool PairRun::meet() {
  const auto rows = std::accumulate(split_.begin(), split_.end(), int64_t{0});
  const auto record =
      pairs::Meeting::record_of(rows > 0 ? Status::ok : Status::no_data, rows, form_, bad_rows());
  stage_ = Stage::done;  // unless all ranks go on, nothing is left
  meeting_ = pairs::Meeting(timed([&] { return meet_ranks(around_.group, record); }));
  if (meeting_.is_off()) {
    return false;
  }
  meeting_.require_alike(scales());
  stage_ = meeting_.rows() > 0 ? Stage::met : Stage::done;
  return true;
}

Towers PairRun::gather() {
  if (stage_ == Stage::done) {
    return {};
  }
  stage_ = shares_gradients() ? Stage::gathered : Stage::done;
  if (around_.group.world_size() == 1) {
    return own_;
  }
  const memory::Unlimited unlimited;  // the others wait in it
  const at::NoGradGuard no_grad;
  const auto blob =
      at::empty({meeting_.blob_bytes()}, at::TensorOptions(around_.device).dtype(at::kByte));
  for (size_t i = 0; i < own_.size(); ++i) {
    const auto bytes = own_[i].reshape({-1}).view(at::kByte);
    blob.narrow(0, meeting_.offset(form_, i), bytes.numel()).copy_(bytes);
  }
  return gathered(timed([&] { return gather_over_ranks(around_.group, blob); }));
}

Towers PairRun::gathered(const std::vector<at::Tensor>& blobs) const {
  Towers all;
  for (size_t i = 0; i < own_.size(); ++i) {
    const auto& tower = form_.towers[i];
    std::vector<at::Tensor> parts;
    for (size_t rank = 0; rank < blobs.size(); ++rank) {
      const auto rows = meeting_.rows_of(rank);
      auto sizes = tower.sizes;
      sizes.insert(sizes.begin(), rows);
      const auto bytes = blobs[rank].narrow(0, meeting_.offset(form_, i), rows * tower.bytes());
      parts.push_back(bytes.view(tower.dtype).view(sizes));
    }
    all.push_back(at::cat(parts));
  }
  return all;
}

/// One sum over the ranks for all towers. In float32 at least: a rank may have none of the towers' dtypes.
void PairRun::share_gradients() {
  if (stage_ != Stage::gathered) {
    return;
  }
  stage_ = Stage::done;
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  const auto rows = meeting_.rows();
  auto flat = at::zeros(
      {rows * meeting_.numel()},
      at::TensorOptions(around_.device).dtype(meeting_.is_double() ? at::kDouble : at::kFloat));
  const auto each = [&](const auto& visit) {
    int64_t begin = 0;
    for (size_t i = 0; i < seeds_.size(); ++i) {
      const auto& tower = form_.towers[i];
      if (tower.trains()) {
        visit(seeds_[i], flat.narrow(0, begin, rows * tower.numel()), tower);
        begin += rows * tower.numel();
      }
    }
  };
  each([](const at::Tensor& seed, const at::Tensor& part, const auto& /*tower*/) {
    if (seed.defined()) {
      part.copy_(seed.reshape({-1}));
    }
  });
  timed([&] { sum_over_ranks(around_.group, flat); });
  const auto own = meeting_.own(around_.group.rank());
  each([&](at::Tensor& seed, const at::Tensor& part, const auto& tower) {
    auto sizes = tower.sizes;
    sizes.insert(sizes.begin(), rows);
    seed = part.view(sizes).narrow(0, own.begin, own.end - own.begin).to(tower.dtype, false, true);
  });
}

PieceWork PairRun::pieces() {
  return {[this](int64_t begin, int64_t end) { return second(begin, end); },
          [this](const at::Tensor& loss, const at::Tensor& seed) {
            work_.backward(loss, at::ones_like(seed));
          },
          work_.tensors};
}

PieceLoss PairRun::second(int64_t begin, int64_t end) {
  ladder::set_generator_states(states_.at(next_piece_++));
  const auto towers = embed(begin, end);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  bool trains = false;
  for (size_t i = 0; i < towers.size(); ++i) {
    trains = trains || towers[i].requires_grad();
    if (towers[i].requires_grad() && seeds_[i].defined()) {
      roots.push_back(towers[i]);
      gradients.push_back(seeds_[i].narrow(0, begin, end - begin));
    }
  }
  TORCH_CHECK_VALUE(trains,
                    "the embeddings have no graph, so that no gradient would come to the model "
                    "(requires_grad: false); compute them from the model's parameters outside "
                    "no_grad, and do not detach them");
  if (around_.checks) {
    require_same(towers, begin, end);
  }
  if (next_piece_ == split_.size()) {  // once, and where their bucket may be launched at once
    roots.insert(roots.end(), beside_.parameters.begin(), beside_.parameters.end());
    gradients.insert(gradients.end(), beside_.gradients.begin(), beside_.gradients.end());
    beside_ = {};
  }
  return {pairs::seeded(value_, roots, std::move(gradients)), static_cast<double>(end - begin)};
}

void PairRun::require_same(const Towers& towers, int64_t begin, int64_t end) const {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < towers.size(); ++i) {
    const auto first = own_[i].narrow(0, begin, end - begin).to(at::kDouble);
    const auto second = towers[i].detach().to(at::kDouble);
    const auto off = (second - first).norm().item<double>();
    const auto size = first.norm().item<double>();
    TORCH_CHECK_VALUE(!(off > (form_.is_half() ? kSameInHalf : kSame) * size),
                      "embed_fn gave other embeddings for the same rows in its second run (tower: ",
                      i, ", relative difference: ", off / size,
                      "); draw random numbers from torch's, Python's or NumPy's own generators, "
                      "which the step puts "
                      "back, and keep no state between calls");
  }
}

std::vector<double> PairRun::losses() const {
  std::vector<double> losses;
  losses.reserve(values_.size());
  for (const auto& value : values_) {
    losses.push_back(value.item<double>());
  }
  return losses;
}

void PairRun::require_alike(const std::vector<ControlRecord>& records) const {
  double least = std::numeric_limits<double>::infinity();
  double most = -least;
  bool finite = true;
  for (const auto& record : records) {
    if (record.weight > 0) {
      const auto loss = record.loss_sum / record.weight;
      finite = finite && std::isfinite(loss);
      least = std::min(least, loss);
      most = std::max(most, loss);
    }
  }
  TORCH_CHECK_VALUE(finite || scales(),
                    "the loss over pairs is not finite (loss: ", mean_loss(records),
                    "); look for NaN in the embeddings, or a temperature that has grown too large");
  const auto tolerance = meeting_.is_half() ? kAlikeInHalf : kAlike;
  const auto size = std::max(std::abs(least), std::abs(most));
  TORCH_CHECK_VALUE(work_.options.own || !finite || !(most - least > tolerance * size),
                    "the loss over pairs is not the same on all ranks (least: ", least,
                    ", most: ", most,
                    "); return the loss of all rows on every rank, or pass own=True where it is "
                    "the mean over the "
                    "rank's own rows");
}

}  // namespace brimful
