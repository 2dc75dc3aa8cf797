#include "pipeline/tied_weights.h"
#include "base/text_stream.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

namespace brimful::pipeline {
namespace {
constexpr double kFailed = std::numeric_limits<double>::quiet_NaN();  // a mark: no gradients came

std::string kind_of(const at::Tensor& parameter) {
  TextStream text;
  text << parameter.sizes() << ' ' << parameter.scalar_type()
       << (parameter.requires_grad() ? "" : ", frozen");
  return text.str();
}

bool is_writable(const at::Tensor& gradient) {
  return gradient.defined() && !gradient.is_sparse();
}
}  // namespace

TiedWeights::TiedWeights(std::vector<std::pair<std::string, at::Tensor>> own,
                         std::shared_ptr<Peers> peers)
    : peers_(std::move(peers)) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> known;
  for (auto& [name, parameter] : own) {
    TORCH_CHECK_VALUE(
        parameter.defined() && parameter.is_leaf(),
        "tied names a tensor that is no parameter (name: ", name,
        "); name the stages' parameters themselves, not results of operations on them");
    TORCH_CHECK_VALUE(std::none_of(known.begin(), known.end(),
                                   [&p = parameter](const auto& k) { return k.is_same(p); }),
                      "a tied weight was named twice (name: ", name,
                      "); name each copy once, and a parameter that stages share not at all");
    known.push_back(parameter);
    auto& copies = weights_[name].copies;
    copies.push_back(parameter);
    TORCH_CHECK_VALUE(kind_of(parameter) == kind_of(copies[0]),
                      "copies of a tied weight differ (name: ", name,
                      ", first: ", kind_of(copies[0]), ", another: ", kind_of(parameter),
                      "); give them the same shape and dtype, trained or frozen");
  }
  for (const auto& [name, weight] : weights_) {
    TORCH_CHECK_VALUE(peers_ || weight.copies.size() > 1,
                      "a tied weight has one copy (name: ", name,
                      ", group: none); name all its copies, or give the group of the ",
                      "processes that have the others");
    for (const auto& copy : weight.copies) {
      if (!peers_ && !copy.is_same(weight.first())) {
        copy.detach().copy_(weight.first());
      }
    }
  }
}

void TiedWeights::make_room() {
  for (auto& [name, weight] : weights_) {
    const auto& first = weight.first();
    const auto device = peers_ ? c10::Device(c10::DeviceType::CPU) : first.device();
    const auto room = [&] {  // ranks whose stages are on devices exchange them over the CPU too
      return at::empty({first.numel() + 1}, at::TensorOptions(device).dtype(first.dtype()));
    };
    if (!weight.own.defined()) {
      weight.theirs = room();
      auto own = room();
      weight.total = peers_ ? room() : own;
      weight.own = std::move(own);  // last: it says that all are there
    }
    weight.fresh.resize(weight.copies.size());
    for (size_t i = 0; i < weight.copies.size(); ++i) {
      if (!is_writable(weight.copies[i].grad()) && !weight.fresh[i].defined()) {
        weight.fresh[i] =
            at::empty_like(weight.copies[i], at::TensorOptions().requires_grad(false));
      }
    }
  }
}

void TiedWeights::drop_room() noexcept {
  for (auto& [name, weight] : weights_) {
    weight.own.reset();
    weight.theirs.reset();
    weight.total.reset();
    weight.fresh.clear();
  }
}

void TiedWeights::meet() {
  std::string lines;
  for (const auto& [name, weight] : weights_) {
    lines += name + '\n' + kind_of(weight.first()) + '\n';
  }
  const auto all = peers_->exchange(lines);
  std::map<std::string, std::string> kinds;
  std::map<std::string, std::vector<int>> ranks_of;
  for (int rank = 0; rank < std::ssize(all); ++rank) {
    std::istringstream text(all[rank]);
    std::string name;
    std::string kind;
    while (std::getline(text, name) && std::getline(text, kind)) {
      const auto& first = kinds.emplace(name, kind).first->second;
      TORCH_CHECK_VALUE(first == kind, "copies of a tied weight differ (name: ", name, ", rank ",
                        ranks_of[name].empty() ? rank : ranks_of[name][0], ": ", first, ", rank ",
                        rank, ": ", kind,
                        "); give them the same shape and dtype, trained or frozen");
      ranks_of[name].push_back(rank);
    }
  }
  for (const auto& [name, ranks] : ranks_of) {
    TORCH_CHECK_VALUE(ranks.size() > 1, "a tied weight is on one rank alone (name: ", name,
                      ", rank: ", ranks[0], "); name its copies alike on all ranks that have one");
  }
  for (auto& [name, weight] : weights_) {
    weight.ranks = ranks_of.at(name);
    fetch(weight);
  }
}

void TiedWeights::fetch(Weight& weight) {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // of temporary copies
  if (peers_->rank() == weight.ranks[0]) {
    weight.values_of(weight.own).copy_(weight.first());
    for (size_t i = 1; i < weight.ranks.size(); ++i) {
      peers_->send(weight.ranks[i], weight.own)->wait();
    }
  } else {
    peers_->receive(weight.ranks[0], weight.own);
  }
  for (const auto& copy : weight.copies) {
    copy.detach().copy_(weight.values_of(weight.own));
  }
}

at::Tensor TiedWeights::Weight::values_of(const at::Tensor& room) const {
  return room.narrow(0, 0, first().numel()).view(first().sizes());
}

// The mark says whether there is any gradient: a weight that was not used on any rank keeps none.
void TiedWeights::Weight::gather() const {
  own.zero_();
  bool any = false;
  for (const auto& copy : copies) {
    const auto& gradient = copy.grad();
    if (!gradient.defined()) {
      continue;
    }
    const auto& room = any ? theirs : own;
    values_of(room).copy_(gradient.is_sparse() ? gradient.to_dense() : gradient);
    if (any) {
      values_of(own).add_(values_of(theirs));
    }
    any = true;
  }
  mark_of(own).fill_(any ? 1 : 0);
}

void TiedWeights::Weight::scatter() {
  for (size_t i = 0; i < copies.size(); ++i) {
    auto& gradient = copies[i].mutable_grad();
    if (!is_writable(gradient)) {
      gradient = fresh[i].defined() ? fresh[i] : at::empty_like(copies[i]).detach();
    }
    gradient.copy_(values_of(total));
  }
}

void TiedWeights::exchange(Weight& weight) {
  if (!peers_) {
    return;
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> sends;
  for (const int rank : weight.ranks) {
    if (rank != peers_->rank()) {
      sends.push_back(peers_->send(rank, weight.own));
    }
  }
  for (const int rank : weight.ranks) {
    const bool is_own = rank == peers_->rank();
    if (!is_own) {
      peers_->receive(rank, weight.theirs);
    }
    const auto& summand = is_own ? weight.own : weight.theirs;
    rank == weight.ranks[0] ? weight.total.copy_(summand) : weight.total.add_(summand);
  }
  for (const auto& work : sends) {
    work->wait();
  }
}

void TiedWeights::sum_gradients(std::exception_ptr failed) {
  const memory::Unlimited unlimited;  // all ranks have accepted the step
  const at::NoGradGuard no_grad;
  bool failed_elsewhere = false;
  try {
    for (auto& [name, weight] : weights_) {
      if (!weight.first().requires_grad()) {
        continue;
      }
      try {
        if (!failed) {
          weight.gather();
        }
      } catch (...) {
        failed = std::current_exception();
      }
      if (failed) {
        weight.mark_of(weight.own).fill_(kFailed);
      }
      exchange(weight);
      failed_elsewhere |= std::isnan(weight.mark_of(weight.total).item<double>());
    }
    for (auto& [name, weight] : weights_) {
      if (!failed && !failed_elsewhere && weight.first().requires_grad() &&
          weight.mark_of(weight.total).item<double>() != 0) {
        weight.scatter();
      }
    }
  } catch (...) {
    drop_room();
    brimful::detail::throw_rank_failed(
        -1, -1, Status::error,
        "the gradients of tied weights could not be summed over the ranks of the pipeline: " +
            brimful::to_string(std::current_exception()));
  }
  drop_room();
  if (failed) {
    std::rethrow_exception(failed);
  }
  if (failed_elsewhere) {
    brimful::detail::throw_rank_failed(
        -1, -1, Status::error,
        "another rank of the pipeline could not give its gradients of tied weights; it says why");
  }
}

}  // namespace brimful::pipeline
