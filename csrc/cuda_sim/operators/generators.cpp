#include "generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace sim_operators {

at::Generator cpu_generator(at::Generator cuda) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15u;  // so that draws are far from those of other seeds
  constexpr uint64_t kOffset = 4;                 // torch wants a multiple of it
  const std::lock_guard lock(cuda.mutex());
  const uint64_t offset = cuda.get_offset();
  cuda.set_offset(offset + kOffset);
  return at::detail::createCPUGenerator(cuda.current_seed() + offset * kOdd);
}

DefaultGenerator::DefaultGenerator(const at::Generator& other)
    : now_(at::detail::getDefaultCPUGenerator()) {
  const std::lock_guard lock(now_.mutex());
  before_ = now_.get_state();
  now_.set_state(other.get_state());
}

DefaultGenerator::~DefaultGenerator() {
  const std::lock_guard lock(now_.mutex());
  now_.set_state(before_);
}

}  // namespace sim_operators
