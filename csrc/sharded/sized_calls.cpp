#include "sharded/sized_calls.h"

#include <c10/util/Exception.h>

namespace brimful {

void SizedCalls::take_up(const std::vector<CollectiveTape::Entry>& entries,
                         const SideGroup& ranks) {
  for (const auto& entry : entries) {
    const auto& group = entry.call.group();
    if (!entry.is_sized() || !group || !entry.call.is_alike_on_ranks()) {
      continue;
    }
    auto& members = members_[group.get()];
    if (members.empty() && members_of_) {
      members = members_of_(group);
    }
    if (!exchange_) {
      rank_ = ranks.rank();
      timeout_ = ranks.timeout();
      exchange_ = std::make_unique<SizeExchange>(ranks.store(), ranks.place("sizes/"), rank_);
    }
  }
}

void SizedCalls::begin(int64_t attempt) {
  attempt_ = attempt;
  if (exchange_) {
    exchange_->own().begin(attempt);
  }
}

void SizedCalls::note(int64_t index, const c10::OperatorHandle& op,
                      const std::vector<c10::IValue>& arguments) {
  if (exchange_) {
    exchange_->own().add(index, op, arguments);
  }
}

void SizedCalls::close(int64_t end) {
  if (exchange_) {
    exchange_->own().close(end);
  }
}

void SizedCalls::issue(const CollectiveCall& call, int64_t index,
                       const std::function<void()>& check) {
  if (!call.has_sizes()) {
    call.issue({});
    return;
  }
  const auto members = members_.find(call.group().get());
  TORCH_CHECK(exchange_ && call.is_alike_on_ranks() && members != members_.end() &&
                  members->second.size() == static_cast<size_t>(call.group()->getSize()),
              "the sizes of ", call.name(), " are not known");
  const auto until = std::chrono::steady_clock::now() + timeout_;
  for (const int member : members->second) {
    if (member == rank_) {
      continue;
    }
    const auto sizes = exchange_->ask(member, attempt_, index, [&] {
      check();
      TORCH_CHECK(std::chrono::steady_clock::now() < until, "rank ", member, " did not say in ",
                  timeout_.count(), " ms which sizes ", call.name(), " has");
    });
    if (sizes) {
      call.issue_sized(*sizes);
      return;
    }
  }
}

}  // namespace brimful
