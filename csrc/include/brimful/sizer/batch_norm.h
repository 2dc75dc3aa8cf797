#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// What a sizer does about BatchNorm, which normalises every piece by itself (ghost batch norm), when it splits a batch.
enum class BatchNormPolicy : uint8_t {
  warn,     ///< one warning, at the first step that is split, which names the modules
  freeze,   ///< the first piece alone updates the running statistics
  rescale,  ///< the pieces together move the running statistics as far as one batch does
  refuse,   ///< no step is split
};

/// @throws c10::ValueError for another word than the policies' names
BRIMFUL_API BatchNormPolicy batch_norm_policy(const std::string& name);

struct BatchNormState {
  bool training = false;
  bool tracks = false;             ///< it keeps running statistics (track_running_stats)
  std::optional<double> momentum;  ///< nothing: the mean over all batches
};

/// A BatchNorm module, of whatever language. <brimful/sizer/batch_norms.h> makes them of torch::nn's modules.
struct BatchNormModule {
  std::string name;
  std::function<BatchNormState()> state;
  std::function<void(const BatchNormState&)> set_state;  ///< `tracks` and `momentum`
  std::function<at::Tensor()> batches;                   ///< num_batches_tracked, or undefined
};

/// A policy and the modules that it is for. Not thread-safe.
class BRIMFUL_API BatchNorms {
 public:
  BatchNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules);

  /// False if the policy refuses and a module depends on the other rows of its batch: one in training, or without running
  /// statistics.
  bool may_split() const;
  /// @throws c10::ValueError, which names the modules, unless may_split() or there is one piece
  void require_whole(int64_t pieces) const;

  /// To be called before the forward of each of a step's pieces. With momentum m, `rescale` gives k pieces
  /// 1 - (1 - m)^(1/k) each. Without a momentum it gives each the k-th part of a batch's share in the mean of all, which
  /// waits for the device once a step. The number of batches goes up by one for a step.
  void before_piece(int64_t piece, int64_t pieces);
  /// Gives the modules back what they had before the first piece.
  void after_step() noexcept;

  /// Calls after_step() at its end, however that comes.
  class Scope {
   public:
    explicit Scope(BatchNorms& norms) : norms_(norms) {}
    ~Scope() { norms_.after_step(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    BatchNorms& norms_;
  };

 private:
  struct Held {
    const BatchNormModule* module = nullptr;
    BatchNormState before;
    at::Tensor batches;  ///< a copy
    double seen = 0;     ///< batches before this step, where there is no momentum
  };
  std::string names() const;
  void warn();
  void hold();
  void change(const Held& held, int64_t piece, int64_t pieces) const;

  BatchNormPolicy policy_;
  std::vector<BatchNormModule> modules_;
  std::vector<Held> held_;
  bool warned_ = false;
};

}  // namespace brimful
