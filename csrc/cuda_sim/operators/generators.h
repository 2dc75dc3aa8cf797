#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace sim_operators {

/// A generator for the CPU that follows from the CUDA generator's seed and offset, which moves on.
at::Generator cpu_generator(at::Generator cuda);

/// While it lives the CPU's default generator is in another state.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(const at::Generator& other);
  ~DefaultGenerator();
  DefaultGenerator(const DefaultGenerator&) = delete;
  DefaultGenerator& operator=(const DefaultGenerator&) = delete;

 private:
  at::Generator now_;
  at::Tensor before_;
};

}  // namespace sim_operators
