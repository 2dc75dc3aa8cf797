#include "reducer/plain_step.h"

#include <brimful/error.h>
#include <brimful/step/control_record.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/thrown_by.h"
#include "reducer/loop_step.h"
#include "step/attempts.h"
#include "step/failures.h"

namespace brimful {
namespace {
using Loops = std::vector<std::shared_ptr<LoopStep>>;

StepAttempts attempts_of(const Loops& loops) {
  std::vector<ParticipantAttempt*> attempts;
  attempts.reserve(loops.size());
  for (const auto& loop : loops) {
    attempts.push_back(&loop->engine().step());
  }
  return StepAttempts(std::move(attempts));
}

/// Throws on every rank if a rank failed the step, or the ranks' parameters differ.
void require_success(const LoopStep& first, const Ending& ending) {
  if (worst(ending.records) < Status::retry) {
    if (!ending.divergence.empty()) {
      detail::throw_plan_mismatch(ending.divergence);
    }
    return;
  }
  const auto step = first.engine().attempt().step() - 1;
  std::vector<Failure> failures;
  for (int rank = 0; rank < std::ssize(ending.records); ++rank) {
    const auto verdict = ending.records[rank].verdict;
    if (verdict >= Status::retry) {
      failures.push_back(posted_failure(*first.engine().link().board,
                                        FailureBoard::place_of(step, rank), rank, verdict));
    }
  }
  throw_step_failed(step, failures);
}
}  // namespace

std::shared_ptr<PlainStep> PlainStep::join(LoopStep& loop, const std::weak_ptr<LoopStep>& self,
                                           const ControlRecord& record) {
  auto& traffic = *loop.engine().link().traffic;
  const std::lock_guard<std::mutex> lock(traffic.mutex);
  auto step = traffic.several ? traffic.running.lock() : nullptr;
  if (!step || step->over_) {
    step = std::make_shared<PlainStep>(self, record);
    traffic.running = step;
    return step;
  }
  step->loops_.push_back(self);
  attempts_of(step->loops()).set_order();
  step->publish_failure();
  return step;
}

Loops PlainStep::loops() const {
  Loops alive;
  for (const auto& each : loops_) {
    if (auto loop = each.lock()) {
      alive.push_back(std::move(loop));
    }
  }
  return alive;
}

void PlainStep::fail(const Failure& failure) {
  failure_ = failure;
  said_.record.verdict = failure.kind;
  publish_failure();
}

void PlainStep::publish_failure() const {
  if (failure_) {
    for (const auto& loop : loops()) {
      loop->publish_failure(failure_->kind, failure_->text);
    }
  }
}

void PlainStep::launch(Fill fill) {
  const auto all = loops();
  attempts_of(all).launch(fill, said_, [&] {
    auto& link = all.front()->engine().link();
    const bool goes_on = close(link);
    share_error(link);
    return goes_on;
  });
}

void PlainStep::finish(bool keeps) {
  over_ = true;
  const auto all = loops();
  const auto ending = attempts_of(all).finish();
  auto error = thrown_by([&] { require_success(*all.front(), ending); });
  const bool stands = error == nullptr;
  for (const auto& loop : all) {
    const auto failed =
        thrown_by([&] { stands ? loop->take_sums(ending.records, keeps) : loop->drop_sums(); });
    error = error ? error : failed;
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void PlainStep::abort(LoopStep& by, FailureKind kind, const std::string& text) {
  over_ = true;
  auto all = loops();
  if (std::none_of(all.begin(), all.end(), [&](const auto& loop) { return loop.get() == &by; })) {
    // It is being destroyed.
    all.push_back({std::shared_ptr<LoopStep>(), &by});
  }
  auto& link = by.engine().link();
  const bool asks = link.traffic->several && !link.alone && !by.engine().attempt().is_managed();
  const bool parts = asks && !is_closed();
  said_ = {};
  said_.record.verdict = kind;
  for (const auto& loop : all) {
    loop->note_died();
    if (!parts && !text.empty()) {
      loop->publish_failure(kind, text);
    }
  }
  const auto error = thrown_by([&] {
    if (!parts) {
      attempts_of(all).launch(Fill::anything, said_);
      return;
    }
    for (const auto& loop : all) {
      if (loop->engine().gate().has_opened()) {
        loop->engine().step().launch_early(Fill::anything);
      }
    }
    if (!has_ended() && !link.is_broken()) {
      part(link, kind);
      if (!text.empty()) {
        by.publish_failure(kind, text);
      }
    }
  });
  if (error) {  // what the others wait for does not come: better they learn it
    link.give_up(error, by.engine().attempt().step());
    share_error(link);
  }
  for (const auto& loop : all) {
    loop->engine().step().leave_backward();
  }
  if (asks) {
    by.note_all_know();
  }
}

}  // namespace brimful
