#include "reducer/sums_under_way.h"

#include <brimful/step/oom.h>

#include <stdexcept>
#include <utility>

#include "base/thrown_by.h"
#include "reducer/device_wait.h"

namespace brimful {

void SumsUnderWay::add(int64_t step, c10::intrusive_ptr<c10d::Work> last) {
  sums_.push_back({step, std::move(last), Clock::now()});
}

void SumsUnderWay::look() {
  while (!sums_.empty() && !link_.is_broken()) {
    const auto& oldest = sums_.front();
    bool has_ended = false;
    const auto failed = thrown_by([&] {
      has_ended = oldest.last->isCompleted();
      if (!has_ended) {
        const auto patience = patience_of(*link_.group->getBackend(link_.device.type()));
        TORCH_CHECK(!patience || Clock::now() - oldest.since < *patience,
                    "the other ranks did not reach a collective in ", patience->count(), " ms");
        return;
      }
      if (const auto error = oldest.last->exception()) {
        std::rethrow_exception(error);
      }
      require_no_error(link_.group, link_.device);
      require_not_aborted();
    });
    if (failed) {
      break_link(failed);
    }
    if (failed || !has_ended) {
      return;
    }
    sums_.pop_front();
  }
}

void SumsUnderWay::wait() {
  link_.begin_wait();
  while (!sums_.empty() && !link_.is_broken()) {
    const auto& oldest = sums_.front();
    const auto failed = thrown_by([&] {
      link_.wait_for(*oldest.last, link_.device, nullptr, oldest.since);
      require_not_aborted();
    });
    if (failed) {
      break_link(failed);
      return;
    }
    sums_.pop_front();
  }
}

bool SumsUnderWay::have_ended() const {
  return sums_.empty() || sums_.back().last->isCompleted();
}

std::exception_ptr SumsUnderWay::named(std::exception_ptr error) const {
  if (sums_.empty()) {
    return error;
  }
  return std::make_exception_ptr(std::runtime_error(
      to_string(error) + "; the sums of step " + std::to_string(sums_.front().step) +
      " had not ended, so that its update is not known: load a checkpoint of before it"));
}

/// After a collective has ended: what is aborted ends, too.
void SumsUnderWay::require_not_aborted() const {
  TORCH_CHECK(!link_.traffic->aborting.has_begun(), "the group's collectives were aborted");
}

std::optional<int64_t> SumsUnderWay::oldest_step() const {
  return sums_.empty() ? std::nullopt : std::optional(sums_.front().step);
}

void SumsUnderWay::break_link(std::exception_ptr error) {
  link_.fail(named(std::move(error)));
}

}  // namespace brimful
