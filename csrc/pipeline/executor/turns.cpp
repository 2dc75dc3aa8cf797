#include "pipeline/executor/turns.h"

#include <ATen/SequenceNumber.h>
#include "pipeline/transport/channel.h"

#include <algorithm>

#include "pipeline/executor/draw_watch.h"

namespace brimful::pipeline {

Turns::Turns(const std::vector<c10::Device>& devices, const std::atomic<bool>& cancelled)
    : cancelled_(cancelled), of_rank_(devices.size()) {
  const auto share = [&](c10::Device of, const auto& takes_part) {
    if (std::count_if(devices.begin(), devices.end(), takes_part) < 2) {
      return;
    }
    auto* const generator = generators_.emplace_back(std::make_unique<Generator>(of)).get();
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      if (takes_part(devices[rank])) {
        of_rank_[rank].push_back(generator);
      }
    }
  };
  share(c10::Device(c10::DeviceType::CPU), [](c10::Device) { return true; });
  for (auto at = devices.begin(); at != devices.end(); ++at) {
    const auto device = *at;
    if (device.is_cuda() && std::find(devices.begin(), at, device) == at) {
      share(device, [&](c10::Device other) { return other == device; });
    }
  }
}

void Turns::begin() {
  surprised_ = false;
  moved_ = false;
  for (const auto& generator : generators_) {
    generator->drew = false;
    generator->callers = RandomState::of(generator->device);
    generator->seed = watches() ? generator->callers.number() : 0;
  }
}

bool Turns::end(bool complete) {
  if (!complete) {
    return false;
  }
  const bool again =
      mode_ == Mode::silent
          ? moved_ || std::any_of(
                          generators_.begin(), generators_.end(),
                          [](const auto& g) { return !(RandomState::of(g->device) == g->callers); })
          : mode_ == Mode::known && surprised_;
  if (again) {
    mode_ = Mode::learning;
  } else if (mode_ == Mode::learning) {
    mode_ = Mode::known;
  }
  for (const auto& generator : generators_) {
    if (again) {
      generator->callers.put(generator->device);
    } else if (generator->drew) {
      RandomState::advance(generator->device);
    }
  }
  return again;
}

void Turns::look(int rank) {
  for (const auto* generator : of_rank_[rank]) {
    if (!generator->callers.still_of(generator->device)) {
      moved_ = true;
    }
  }
}

bool Turns::drew_together(int rank) {
  if (!watches()) {
    look(rank);
  }
  return moved_;
}

Turns::Turn::Turn(Turns& turns, int rank, int stage, DrawPart part, int microbatch)
    : turns_(turns), rank_(rank), stage_(stage), part_(part) {
  if (!turns_.watches()) {
    return;
  }
  for (auto* generator : turns_.of_rank_[rank]) {
    if (must_take(*generator)) {
      take(*generator, microbatch);
    }
  }
  DrawWatch::take_seen();
  sequence_ = at::sequence_number::peek();
}

bool Turns::Turn::must_take(const Generator& generator) const {
  return turns_.mode_ == Mode::learning ||
         (generator.draws && turns_.touches_[stage_][part_ != DrawPart::forward]);
}

void Turns::Turn::take(Generator& generator, int microbatch) {
  std::unique_lock lock(generator.turn);
  if (turns_.cancelled_.load(std::memory_order_acquire)) {
    for (auto& held : held_) {
      end(held);
    }
    throw Cancelled();
  }
  auto before = RandomState::of(generator.device);
  auto seed = mixed(generator.seed, static_cast<uint64_t>(stage_));
  seed = mixed(mixed(seed, static_cast<uint64_t>(microbatch)), static_cast<uint64_t>(part_));
  RandomState::seed(generator.device, seed);
  held_.push_back(
      {&generator, std::move(lock), std::move(before), RandomState::of(generator.device)});
}

void Turns::Turn::end(Held& held) {
  auto& generator = *held.generator;
  if (turns_.abandoned_) {
    return;
  }
  const bool drew = !(RandomState::of(generator.device) == held.seeded);
  held.before.put(generator.device);
  if (drew) {
    generator.drew = true;
    if (!generator.draws) {  // once known, others read it
      generator.draws = true;
    }
    turns_.touches_[stage_][part_ != DrawPart::forward] = true;
  }
}

Turns::Turn::~Turn() {
  if (!turns_.watches()) {
    turns_.look(rank_);
    return;
  }
  for (auto& held : held_) {
    end(held);
  }
  // The engine numbers one node of its own; more come of activations that are computed anew.
  const bool recomputed = part_ != DrawPart::forward && at::sequence_number::peek() > sequence_ + 1;
  auto& touches = turns_.touches_[stage_][part_ != DrawPart::forward];
  if ((DrawWatch::take_seen() || recomputed) && !touches) {
    touches = true;
    turns_.surprised_ = true;
  }
}

}  // namespace brimful::pipeline
