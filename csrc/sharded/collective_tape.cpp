#include "sharded/collective_tape.h"

#include <algorithm>
#include <utility>

namespace brimful {

void CollectiveTape::begin_piece() {
  const std::lock_guard lock(mutex_);
  issued_ = 0;
  storages_.clear();
  under_way_ = true;
  next_.clear();
  alike_ = state_ == State::written;
}

void CollectiveTape::end_piece() {
  std::string fewer;
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(under_way_, false)) {
      return;
    }
    if (state_ == State::holds && issued_ < entries_.size()) {
      fewer = "a piece has ended before its collective " + std::to_string(issued_) + " (" +
              expected() + ")";
    } else if (state_ == State::unknown || state_ == State::written) {
      const bool confirms = alike_ && issued_ == entries_.size();
      state_ = confirms ? State::holds : State::written;
      entries_ = std::move(next_);
    }
  }
  if (!fewer.empty()) {
    part(fewer);
  }
}

void CollectiveTape::forget_piece() {
  const std::lock_guard lock(mutex_);
  under_way_ = false;
  issued_ = 0;
  next_.clear();
}

CollectiveTape::State CollectiveTape::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

int64_t CollectiveTape::issued() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(issued_);
}

std::vector<CollectiveTape::Entry> CollectiveTape::rest() const {
  const std::lock_guard lock(mutex_);
  if (!under_way_) {
    return {};
  }
  return {entries_.begin() + static_cast<std::ptrdiff_t>(std::min(issued_, entries_.size())),
          entries_.end()};
}

std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> CollectiveTape::groups() const {
  const std::lock_guard lock(mutex_);
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> all;
  for (const auto& entry : entries_) {
    const auto& group = entry.call.group();
    if (group && std::find(all.begin(), all.end(), group) == all.end()) {
      all.push_back(group);
    }
  }
  return all;
}

std::string CollectiveTape::expected() const {
  return issued_ < entries_.size() ? entries_[issued_].call.name() : "none";
}

void CollectiveTape::on_collective(const c10::OperatorHandle& op,
                                   const std::vector<c10::IValue>& arguments) {
  std::string other;
  bool writes = false;
  {
    const std::lock_guard lock(mutex_);
    if (!under_way_) {
      return;
    }
    writes = state_ == State::unknown || state_ == State::written;
    const auto* const entry = issued_ < entries_.size() ? &entries_[issued_] : nullptr;
    const bool same = entry != nullptr && entry->call.is(op, arguments, entry->is_sized());
    if (same && state_ == State::holds && entry->is_sized()) {
      append_storages(op, arguments, storages_);
      if (on_sized_) {
        on_sized_(issued_, op, arguments);
      }
    }
    alike_ = alike_ && same;
    if (state_ == State::holds && !same) {
      other = "collective " + std::to_string(issued_) + " of a piece is " + name_of(op, arguments) +
              " and not " + expected();
    }
    ++issued_;
  }
  if (!other.empty()) {
    part(other);
  } else if (writes) {
    const auto source = source_of_ ? source_of_() : -1;
    const std::lock_guard lock(mutex_);
    next_.push_back({CollectiveCall(op, arguments), source});
  }
}

void CollectiveTape::let_go() {
  const std::lock_guard lock(mutex_);
  for (const auto& each : storages_) {
    if (auto storage = each.lock()) {
      c10d::wait_tensor(at::empty({0}, at::kByte).set_(c10::Storage(std::move(storage))));
    }
  }
  storages_.clear();
}

void CollectiveTape::part(const std::string& what) {
  {
    const std::lock_guard lock(mutex_);
    state_ = State::parted;
  }
  if (on_parting_) {
    on_parting_(what);
  }
}

}  // namespace brimful
