#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ladder/aside.h"
#include "ladder/choose.h"

namespace brimful::ladder {

/// A model's modules, as they are run with rungs: Python's, or C++'s own.
class Modules {
 public:
  virtual ~Modules() = default;
  /// By their numbers.
  virtual std::vector<std::string> names() const = 0;
  virtual Allowed allowed() const = 0;
  /// What to recompute where nothing has been measured.
  virtual std::vector<int32_t> coarse() const = 0;
  /// Tensors that are never put aside, since they live on: parameters and buffers.
  virtual std::vector<at::Tensor> standing() const = 0;

  /// From here on the modules run so. `aside` is for what is offloaded, `recorder` may be null.
  virtual void begin(const Rungs& rungs, std::shared_ptr<Aside> aside,
                     std::shared_ptr<StepEventRecorder> recorder) = 0;
  virtual void begin_forward() = 0;
  virtual void end_forward() noexcept = 0;
  /// As they were before begin().
  virtual void end() noexcept = 0;
  /// Why a module was found not to be recomputable since begin(); it is not allowed any more. Empty: none was.
  virtual std::string rejected() const = 0;

  /// Whether there are hooks for saved tensors, by which whatever is saved can be offloaded.
  virtual bool can_offload() const { return true; }
  /// Called once, before begin().
  virtual void set_device(c10::Device /*device*/) {}
  /// Of the attempt under way: what was recomputed, if that is more than begin() said.
  virtual std::vector<int32_t> recomputed() const { return {}; }
  /// What an attempt without a recorder took, from which plans follow; nothing where that is not known. Before end().
  virtual std::optional<StepEvents> measured() { return std::nullopt; }
};

}  // namespace brimful::ladder
