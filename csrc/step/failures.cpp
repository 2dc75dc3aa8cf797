// What ranks post of their failures, and what all of them raise.
#include "step/failures.h"

#include <brimful/step/step.h>

#include <algorithm>

namespace brimful {
namespace {
/// How long the others wait for the message of a rank that failed.
constexpr FailureBoard::Patience kTextPatience{1000};
}  // namespace

Failure posted_failure(const FailureBoard& board, const std::string& place, int rank,
                       Status verdict) {
  auto failure = board.await(place, kTextPatience);
  failure.rank = rank;
  if (verdict == Status::out_of_memory) {
    failure.kind = verdict;
  }
  return failure;
}

const Failure& severest(const std::vector<Failure>& failures) {
  const auto found = std::find_if(failures.begin(), failures.end(), [](const Failure& failure) {
    return failure.kind == Status::out_of_memory;
  });
  return found == failures.end() ? failures.front() : *found;
}

std::string to_string(const std::vector<Failure>& failures) {
  std::string text;
  for (const auto& failure : failures) {
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(failure.rank) + ": " +
            to_string(failure);
  }
  return text;
}

void throw_step_failed(int64_t step, const std::vector<Failure>& failures) {
  const auto& worst = severest(failures);
  detail::throw_rank_failed(worst.rank, step, worst.kind,
                            "step " + std::to_string(step) + " failed on " + to_string(failures));
}

std::string failure_text(const StepGroup& group, int rank) {
  if (group.participants().empty()) {
    return {};
  }
  const auto& first = *group.participants()[0];
  const auto place = FailureBoard::place_of(first.step() - 1, rank);
  return to_string(posted_failure(first.board(), place, rank, Status::error));
}

std::vector<Failure> StepGroup::failures(const std::vector<ControlRecord>& records) {
  std::vector<Failure> found;
  for (size_t i = 0; i < records.size(); ++i) {
    if (!is_failure(records[i].verdict)) {
      continue;
    }
    const auto rank = static_cast<int>(i);
    if (participants_.empty()) {
      found.push_back({rank, 0, step(), records[i].verdict, {}});
      continue;
    }
    const auto& first = *participants_[0];
    found.push_back(posted_failure(first.board(), FailureBoard::place_of(first.step() - 1, rank),
                                   rank, records[i].verdict));
  }
  return found;
}

void StepGroup::publish_failure(FailureKind kind, const std::string& text) {
  for (const auto& participant : participants_) {
    participant->board().try_post({rank(), 0, participant->step(), kind, text});
  }
}

}  // namespace brimful
