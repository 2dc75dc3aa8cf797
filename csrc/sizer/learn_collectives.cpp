// The collectives that a model makes, shown by a few rows before the first step.
#include "sizer/learn_collectives.h"

#include <algorithm>

#include "base/thrown_by.h"
#include "sizer/loss_scale.h"
#include "step/inner_collectives.h"
#include "step/pieces_run.h"

namespace brimful {
namespace {
constexpr int64_t kFewRows = 2;  // some modules want more than one in training
constexpr int kRehearsals = 2;

void rehearse_few(StepEngine& engine, const StepInput& input, const PieceWork& work,
                  GradScaler* scaler) {
  const auto rows = std::min(*input.rows, kFewRows);
  KeptBatch few;
  if (work.tensors) {
    few.begin(work.tensors(0, rows), KeptBatch::Copies::all);
  }
  const PieceWork as_in_step{work.forward, scaled_backward(work.backward, scaler), {}};
  const auto error =
      thrown_by([&] { rehearse(engine.group(), rows, as_in_step, [&] { few.restore(); }); });
  few.restore();
  engine.before().transaction().restore();
  if (error) {
    std::rethrow_exception(error);
  }
}
}  // namespace

void learn_collectives(StepEngine& engine, const StepInput& input, const PieceWork& work,
                       GradScaler* scaler) {
  const auto& participants = engine.group().participants();
  if (inner_collectives(engine.group()) != InnerCollectives::unlearned) {
    return;
  }
  for (const auto& participant : participants) {
    participant->begin_learning(input.rows.has_value());
  }
  bool known = false;
  for (int i = 1; !known && i <= kRehearsals; ++i) {
    rehearse_few(engine, input, work, scaler);
    known = true;
    for (const auto& participant : participants) {
      known = participant->end_learning(/*last=*/i == kRehearsals) && known;
    }
  }
}

}  // namespace brimful
