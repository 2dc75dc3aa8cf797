#include "pipeline/executor/random_state.h"

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <brimful/memory/stats.h>

#include <mutex>

namespace brimful::pipeline {
namespace {
constexpr uint64_t kOffsetStep = 4;  // numbers of Philox come in fours

at::Generator default_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::CPUGeneratorImpl* cpu(const at::Generator& generator) {
  return generator.get<at::CPUGeneratorImpl>();
}

std::pair<uint64_t, uint64_t> place_of(const at::Generator& generator) {
  return {generator.current_seed(), generator.get_offset()};
}

uint64_t next_of(at::mt19937& engine) {
  const uint64_t high = engine();
  return high << 32U | engine();
}
}  // namespace

uint64_t mixed(uint64_t number, uint64_t with) {  // splitmix64
  auto z = number + (with + 1) * 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

RandomState RandomState::of(c10::Device device) {
  auto generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  RandomState state;
  if (device.is_cpu()) {
    state.engine_ = cpu(generator)->engine();
    state.next_float_ = cpu(generator)->next_float_normal_sample();
    state.next_double_ = cpu(generator)->next_double_normal_sample();
  } else {
    const memory::Unlimited unlimited;
    state.bytes_ = generator.get_state();
    state.place_ = place_of(generator);
  }
  return state;
}

void RandomState::seed(c10::Device device, uint64_t seed) {
  auto generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

void RandomState::put(c10::Device device) const {
  auto generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  if (device.is_cpu()) {
    cpu(generator)->set_engine(engine_);
    cpu(generator)->set_next_float_normal_sample(next_float_);
    cpu(generator)->set_next_double_normal_sample(next_double_);
  } else {
    generator.set_state(bytes_);
  }
}

uint64_t RandomState::number() const {
  if (!bytes_.defined()) {
    auto engine = engine_;
    return next_of(engine);
  }
  uint64_t number = 0;
  const auto* bytes = bytes_.const_data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes_.numel(); ++i) {
    number = mixed(number, bytes[i]);
  }
  return number;
}

void RandomState::advance(c10::Device device) {
  auto generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  if (device.is_cpu()) {
    cpu(generator)->random64();
  } else {
    generator.set_offset(generator.get_offset() + kOffsetStep);
  }
}

bool RandomState::operator==(const RandomState& other) const {
  if (bytes_.defined() || other.bytes_.defined()) {
    return bytes_.defined() && other.bytes_.defined() && at::equal(bytes_, other.bytes_);
  }
  const auto own = engine_.data();
  const auto theirs = other.engine_.data();
  return own.left_ == theirs.left_ && own.next_ == theirs.next_ && own.seed_ == theirs.seed_ &&
         own.state_ == theirs.state_ && next_float_ == other.next_float_ &&
         next_double_ == other.next_double_;
}

bool RandomState::still_of(c10::Device device) const {
  auto generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  if (!device.is_cpu()) {
    return place_of(generator) == place_;
  }
  const auto now = cpu(generator)->engine().data();
  const auto then = engine_.data();
  return now.left_ == then.left_ && now.next_ == then.next_ && now.seed_ == then.seed_ &&
         now.state_[0] == then.state_[0] &&
         cpu(generator)->next_float_normal_sample() == next_float_ &&
         cpu(generator)->next_double_normal_sample() == next_double_;
}

}  // namespace brimful::pipeline
