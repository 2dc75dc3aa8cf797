// What ranks say of their failures, and learn of those of others.
#include <brimful/step/step.h>

#include "step/failure_board.h"

namespace brimful {
namespace {
/// How long the others wait for the message of a rank that failed.
constexpr FailureBoard::Patience kTextPatience{1000};
}  // namespace

std::string StepGroup::failure_text(int rank) {
  if (participants_.empty()) {
    return {};
  }
  const auto& first = *participants_[0];
  return to_string(
      first.board().await(FailureBoard::place_of(first.step() - 1, rank), kTextPatience));
}

std::string StepGroup::failure_texts(const std::vector<ControlRecord>& records) {
  std::string texts;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (!is_failure(records[rank].verdict)) {
      continue;
    }
    texts += (texts.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " +
             failure_text(static_cast<int>(rank));
  }
  return texts;
}

void StepGroup::publish_failure(FailureKind kind, const std::string& text) {
  for (const auto& participant : participants_) {
    participant->board().try_post({rank(), 0, participant->step(), kind, text});
  }
}

}  // namespace brimful
