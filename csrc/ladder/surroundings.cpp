#include "ladder/surroundings.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace brimful::ladder {
at::Tensor generator_state(c10::Device device) {
  const memory::Unlimited unlimited;
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_states(const GeneratorStates& states) {
  for (const auto& [device, state] : states) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

GeneratorStates changed_since(const GeneratorStates& before) {
  GeneratorStates changed;
  for (const auto& [device, state] : before) {
    const auto now = generator_state(device);
    if (now.nbytes() != state.nbytes() ||
        std::memcmp(now.const_data_ptr(), state.const_data_ptr(), state.nbytes()) != 0) {
      changed.emplace_back(device, state);
    }
  }
  return changed;
}

AutocastState AutocastState::now() {
  AutocastState state;
  state.keeps_casts = at::autocast::is_autocast_cache_enabled();
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    state.types.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  return state;
}

void AutocastState::set() const {
  at::autocast::set_autocast_cache_enabled(keeps_casts);
  for (const auto& [type, enabled, dtype] : types) {
    if (at::autocast::is_autocast_enabled(type) != enabled) {
      at::autocast::set_autocast_enabled(type, enabled);
    }
    at::autocast::set_autocast_dtype(type, dtype);
  }
}

Surroundings::Surroundings(const GeneratorStates& generators, const AutocastState& autocast)
    : outer_autocast_(AutocastState::now()) {
  for (const auto& [device, state] : generators) {
    outer_generators_.emplace_back(device, generator_state(device));
  }
  set_generator_states(generators);
  autocast.set();
  nests_ = std::any_of(autocast.types.begin(), autocast.types.end(),
                       [](const auto& type) { return type.enabled; });
  if (nests_) {
    at::autocast::increment_nesting();
  }
}

Surroundings::~Surroundings() {
  if (nests_ && at::autocast::decrement_nesting() == 0) {  // casts for a graph that is done
    at::autocast::clear_cache();
  }
  outer_autocast_.set();
  set_generator_states(outer_generators_);
}

}  // namespace brimful::ladder
