#include "sharded/issued_sizes.h"

namespace brimful {

void IssuedSizes::begin(int64_t attempt) {
  const std::lock_guard lock(mutex_);
  attempt_ = attempt;
  end_ = -1;
  places_.clear();
  sizes_.clear();
  changed_.notify_all();
}

void IssuedSizes::add(int64_t index, const c10::OperatorHandle& op,
                      const std::vector<c10::IValue>& arguments) {
  const std::lock_guard lock(mutex_);
  places_.push_back({index, sizes_.size()});
  append_sizes(op, arguments, sizes_);
  changed_.notify_all();
}

void IssuedSizes::close(int64_t end) {
  const std::lock_guard lock(mutex_);
  end_ = end_ < 0 ? end : end_;
  changed_.notify_all();
}

void IssuedSizes::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

bool IssuedSizes::is_stopped() const {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

std::optional<IssuedSizes::Known> IssuedSizes::wait_for(int64_t attempt, size_t nth) {
  std::unique_lock lock(mutex_);
  const auto is_over = [&] { return stopped_ || attempt_ > attempt; };
  changed_.wait(lock, [&] {
    return is_over() || (attempt_ == attempt && (places_.size() > nth || end_ >= 0));
  });
  if (is_over() || places_.size() <= nth) {
    return std::nullopt;
  }
  const auto& place = places_[nth];
  const auto begin = sizes_.begin() + static_cast<std::ptrdiff_t>(place.begin);
  const auto end = nth + 1 < places_.size()
                       ? sizes_.begin() + static_cast<std::ptrdiff_t>(places_[nth + 1].begin)
                       : sizes_.end();
  return Known{place.index, CallSizes(begin, end)};
}

int64_t IssuedSizes::end_of(int64_t attempt) const {
  const std::lock_guard lock(mutex_);
  return attempt_ == attempt ? end_ : -1;
}

}  // namespace brimful
