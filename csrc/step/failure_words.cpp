// What ranks say of their failures, and hear of those of others.
#include <brimful/step/step.h>

namespace brimful {
namespace {
constexpr int64_t kTextPatience =
    1000;  // how long the others wait for the words of a rank that failed, in ms
}  // namespace

std::string StepGroup::failure_text(int rank) {
  return participants_.empty() ? ""
                               : to_string(participants_[0]->read_failure(rank, kTextPatience));
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
    participant->publish_failure(kind, text);
  }
}

}  // namespace brimful
