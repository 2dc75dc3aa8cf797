// What a call that is under way is doing, for other threads to ask.
#include <brimful/pipeline/schedule_text.h>

#include "base/format.h"
#include "base/text_stream.h"
#include "pipeline/pipeline_state.h"
#include "pipeline/schedule/action_sentence.h"

namespace brimful::pipeline {

PipelineProgress Pipeline::progress() const {
  return {state_->doing.load(std::memory_order_acquire), state_->executor->progress()};
}

std::string to_string(const PipelineProgress& progress) {
  TextStream text;
  text << progress.doing;
  for (const auto& rank : progress.ranks) {
    text << "\n  rank " << rank.rank << ": ";
    if (rank.done == rank.actions) {
      text << "done with its " << rank.actions << " actions";
      continue;
    }
    text << "action " << rank.done + 1 << " of " << rank.actions << ", " << to_string(rank.action)
         << " (" << to_sentence(rank.action) << ")"
         << (rank.waits ? ", waits for its message" : "");
    if (rank.seconds > 0) {
      text << ", for " << format_seconds(rank.seconds);
    }
  }
  return text.str();
}

}  // namespace brimful::pipeline
