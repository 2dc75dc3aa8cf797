#include "ladder/part_figures.h"

#include <algorithm>

namespace brimful::ladder {

StepEvents events_of(const PartFigures& piece) {
  StepEvents step;
  step.brought_back = true;  // states of generators are in the peaks already
  const auto next = [&] { return step.size++; };
  const auto hold_beside = [&](int64_t bytes) {
    step.blocks.push_back({std::max<int64_t>(bytes, 0), next(), kNever});
    return step.blocks.size() - 1;
  };
  for (size_t i = 0; i < piece.calls.size(); ++i) {
    StepEvents::Call call;
    call.module = piece.calls[i].part;
    call.forward_ms = piece.calls[i].forward_ms;
    call.entered_at = next();
    step.blocks.push_back({piece.calls[i].saved_bytes, next(), kNever});
    StepEvents::Save save;
    save.block = static_cast<int64_t>(i);
    save.call = static_cast<int64_t>(i);
    save.saved_at = next();
    step.saves.push_back(save);
    call.left_at = next();
    step.blocks[i].given_back_at = next();
    step.calls.push_back(std::move(call));
  }
  const auto all_held = hold_beside(piece.peak_bytes);
  step.blocks[all_held].given_back_at = next();
  for (const auto place : piece.second_run) {
    const auto& call = piece.calls[static_cast<size_t>(place)];
    auto& save = step.saves[static_cast<size_t>(place)];
    const auto beside = hold_beside(call.peak_bytes - call.saved_bytes);
    save.used_at = next();
    next();
    save.dropped_at = next();
    step.blocks[beside].given_back_at = next();
  }
  return step;
}

}  // namespace brimful::ladder
