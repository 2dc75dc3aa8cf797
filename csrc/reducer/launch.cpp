// Buckets are launched in order: during backward as they fill (advance_early), the last one only when the step knows its
// verdict, and zeroed if this rank cannot do its part.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <optional>

#include "reducer/engine_step.h"

namespace brimful {

void EngineStep::launch() {
  const bool sends = gate_.open();
  const bool is_last = launcher_.next() == layout_.last();
  layout_.buckets[launcher_.next()].join_current_stream();
  if (is_last) {
    write_tail();
  }
  launcher_.launch(placement_.scales(), attempt_.step(), sends);
  if (is_last && sends && !link_.is_broken()) {
    transport_->send();
  }
}

void EngineStep::write_tail() {
  auto& record = outgoing_.record;
  record.plan = tuner_.proposed();
  record.updated.fill(updates_ ? kAllUnknown : kNoneCompared);
  const bool looks = looks_at_updates() && record.verdict < Status::retry;
  const auto updated = looks ? updates_->look(record.updated) : at::Tensor();
  layout_.tail->write({placement_.used(), outgoing_, updated, layout_.own_rows(),
                       attempt_.buffer_source(), attempt_.is_managed()});
  transport_->say(outgoing_, updated);
}

void EngineStep::advance_early() {
  if (!attempt_.launches() || arrivals_.launch_late()) {
    return;
  }
  while (launcher_.may_launch_early()) {
    hooks_.check(/*throws=*/true, attempt_.step());
    launch();
  }
  launcher_.advance_after();
}

void EngineStep::advance() {
  const auto lock = attempt_.lock();
  advance_early();
}

Progress EngineStep::progress() const {
  const auto done = [](const auto& bucket) { return bucket.pending == 0; };
  return {launcher_.next(), layout_.last() + 1,
          attempt_.launches() && !arrivals_.may_come_again() &&
              std::all_of(layout_.buckets.begin(), layout_.buckets.end(), done),
          arrivals_.came_late()};
}

void EngineStep::launch_early(Fill fill) {
  launch_until(layout_.last(), fill, nullptr);
}

void EngineStep::launch_last(Fill fill, const Announcement& said) {
  launch_until(layout_.last() + 1, fill, &said);
}

void EngineStep::launch_until(int64_t end, Fill with, const Announcement* said) {
  const auto lock = attempt_.lock();
  const memory::Unlimited unlimited;
  std::optional<memory::UnlimitedEverywhere> also_the_groups_threads;
  if (hooks_
          .is_set()) {  // its later collectives allocate there, where a refusal could only break the group
    also_the_groups_threads.emplace();
  }
  const bool own = with == Fill::gradients;
  const at::AutoGradMode no_grad_to_drain(own && at::GradMode::is_enabled());
  gate_.share_error();
  if (said != nullptr) {
    outgoing_ = *said;
  }
  if (own && said != nullptr) {
    outgoing_.record.work_ms = static_cast<float>(watch_.end_work(link_.traffic->agreeing_ms));
    hooks_.collect(layout_);
  } else if (said != nullptr && launcher_.next() <= layout_.last()) {
    layout_.buckets.back().join_current_stream();
    layout_.let_go_of_earlier(layout_.last());
    layout_.buckets.back().gradients.zero_();
  }
  if (own) {
    attempt_.complete();
  }
  const bool sends = gate_.open();
  while (launcher_.next() < end) {
    if (own && placement_.fill(launcher_.next())) {
      watch_.ready(launcher_.next());
    }
    hooks_.wait();
    hooks_.check(/*throws=*/own, attempt_.step());
    if (own || launcher_.next() == layout_.last()) {
      launch();
    } else {
      launcher_.launch_drained(with, attempt_.step(), sends);
    }
  }
  hooks_.wait();  // of the early part: other modules' buckets may follow
  gate_.share_error();
}

}  // namespace brimful
