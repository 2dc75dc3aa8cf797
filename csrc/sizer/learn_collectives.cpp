// The collectives that a model makes, shown by a few rows before the first step.
#include <algorithm>

#include "base/thrown_by.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/loss_scale.h"

namespace brimful {
namespace {
constexpr int64_t kFewRows = 2;  // some modules want more than one in training
constexpr int kRehearsals = 2;
}  // namespace

void BatchSizer::State::learn_collectives(const StepInput& input, const PieceWork& work) {
  auto& group = engine_.group();
  if (group.inner_collectives() != InnerCollectives::unlearned) {
    return;
  }
  for (const auto& participant : group.participants()) {
    participant->begin_learning(input.rows.has_value());
  }
  bool known = false;
  for (int i = 1; !known && i <= kRehearsals; ++i) {
    rehearse_few(input, work);
    known = true;
    for (const auto& participant : group.participants()) {
      known = participant->end_learning(/*last=*/i == kRehearsals) && known;
    }
  }
}

void BatchSizer::State::rehearse_few(const StepInput& input, const PieceWork& work) {
  const auto rows = std::min(*input.rows, kFewRows);
  KeptBatch few;
  if (work.tensors) {
    few.begin(work.tensors(0, rows), KeptBatch::Copies::all);
  }
  const PieceWork as_in_step{work.forward, scaled_backward(work.backward, options_.scaler), {}};
  const auto error =
      thrown_by([&] { rehearse(engine_.group(), rows, as_in_step, [&] { few.restore(); }); });
  few.restore();
  engine_.before().transaction().restore();
  if (error) {
    std::rethrow_exception(error);
  }
}

}  // namespace brimful
