#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <utility>
#include <vector>

namespace brimful::ladder {

using GeneratorStates = std::vector<std::pair<c10::Device, at::Tensor>>;

/// Of the device's default generator.
at::Tensor generator_state(c10::Device device);
void set_generator_states(const GeneratorStates& states);
/// Those of `before` that have changed since.
GeneratorStates changed_since(const GeneratorStates& before);

/// A thread's autocast.
struct AutocastState {
  struct Type {
    c10::DeviceType type;
    bool enabled;
    c10::ScalarType dtype;
  };
  std::vector<Type> types;
  bool keeps_casts = true;

  static AutocastState now();
  void set() const;
};

/// While it lives, generators and autocast are as they were then; afterwards as they are now.
class Surroundings {
 public:
  Surroundings(const GeneratorStates& generators, const AutocastState& autocast);
  ~Surroundings();
  Surroundings(const Surroundings&) = delete;
  Surroundings& operator=(const Surroundings&) = delete;

 private:
  GeneratorStates outer_generators_;
  AutocastState outer_autocast_;
  bool nests_ = false;
};

}  // namespace brimful::ladder
