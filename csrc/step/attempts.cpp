#include "step/attempts.h"

#include <algorithm>
#include <exception>

#include "base/thrown_by.h"

namespace brimful {

void StepAttempts::set_order() const {
  for (size_t i = 0; i < all_.size(); ++i) {
    all_[i]->set_order(i == 0 ? nullptr : all_[i - 1],
                       i + 1 == all_.size() ? nullptr : all_[i + 1]);
  }
}

void StepAttempts::launch(Fill fill, const Announcement& said,
                          const std::function<bool()>& closes) const {
  for (auto* each : all_) {
    each->launch_early(fill);
  }
  if (closes && !closes()) {
    return;
  }
  for (auto* each : all_) {
    each->launch_last(fill, said);
  }
}

Ending StepAttempts::finish() const {
  Ending all;
  std::exception_ptr error;
  for (auto* each : all_) {
    const auto failed = thrown_by([&] {
      auto theirs = each->finish();
      all.divergence = all.divergence.empty() ? std::move(theirs.divergence) : all.divergence;
      if (all.records.empty()) {
        all.records = std::move(theirs.records);
        all.sums = std::move(theirs.sums);
        return;
      }
      for (size_t rank = 0; rank < all.records.size(); ++rank) {
        all.records[rank].verdict =
            std::max(all.records[rank].verdict, theirs.records[rank].verdict);
      }
    });
    error = error ? error : failed;
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return all;
}

}  // namespace brimful
