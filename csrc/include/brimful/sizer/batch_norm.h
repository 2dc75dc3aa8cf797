#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brimful {
namespace detail {
class NormCalls;
class NormPuts;
}  // namespace detail

/// What a sizer does about BatchNorm, which normalises every piece by itself (ghost batch norm), when it splits a batch.
enum class BatchNormPolicy : uint8_t {
  warn,     ///< one warning, at the first step that is split, which names the modules
  freeze,   ///< the first piece alone updates the running statistics
  rescale,  ///< the pieces together move the running statistics as the whole batch does
  refuse,   ///< no step is split
};

/// @throws c10::ValueError for another word than the policies' names
BRIMFUL_API BatchNormPolicy batch_norm_policy(const std::string& name);

struct BatchNormState {
  bool training = false;
  bool tracks = false;             ///< it keeps running statistics (track_running_stats)
  std::optional<double> momentum;  ///< nothing: the mean over all batches
};

/// Running statistics; undefined where a module has none.
struct BatchNormBuffers {
  at::Tensor mean;
  at::Tensor variance;
  at::Tensor batches;  ///< num_batches_tracked
};

/// A BatchNorm module, of whatever language. <brimful/sizer/batch_norms.h> makes them of torch::nn's modules.
struct BatchNormModule {
  std::string name;
  std::function<BatchNormState()> state;
  std::function<void(std::optional<double>)> set_momentum;
  std::function<BatchNormBuffers()> buffers;
  /// Set for a module of another class, whose buffers may be running statistics: these. It counts once its forward was seen
  /// to change one of them; how it does is not known, and so `freeze` and `rescale` leave it alone.
  std::function<std::vector<at::Tensor>()> statistics;
};

/// Whether a buffer of this name, such as running_mean, is one of the statistics that modules keep. Pure.
BRIMFUL_API bool names_statistics(const std::string& name);

/// A policy and the modules that it is for. Not thread-safe.
class BRIMFUL_API BatchNorms {
 public:
  BatchNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules);

  /// False if the policy refuses and a module depends on the other rows of its batch: one in training, or without running
  /// statistics; or a module of another class was seen to change its statistics.
  bool may_split() const;
  /// @throws c10::ValueError, which names the modules, unless may_split() or there is one piece
  void require_whole(int64_t pieces) const;

  /// Statistics of a module of another class, before it ran.
  struct Watched {
    size_t module = 0;
    std::vector<at::Tensor> statistics;
    std::vector<at::Tensor> copies;  ///< torch's batch_norm leaves no trace in a version
  };
  /// A forward under way.
  struct Piece {
    std::shared_ptr<detail::NormCalls> calls;  ///< nothing where nothing is to be noted
    std::vector<Watched> watched;
  };
  /// Before and after the forward of one of a step's pieces, in their order. Under `rescale` what torch's batch_norm finds in
  /// this thread meanwhile is noted, without a wait for the device but once a step where a module has no momentum. A forward
  /// that throws drops its Piece.
  Piece begin_piece(int64_t piece, int64_t pieces);
  /// @throws c10::ValueError under `refuse` if one of several pieces changed statistics
  void end_piece(int64_t piece, int64_t pieces, const Piece& begun);
  /// Both, around `work`.
  template <typename Work>
  auto forward(int64_t piece, int64_t pieces, const Work& work) {
    const auto begun = begin_piece(piece, pieces);
    auto result = work();
    end_piece(piece, pieces, begun);
    return result;
  }
  /// To be called when all pieces have run, with all that backward computes again. Under `freeze` running statistics become
  /// what they were behind the first piece, under `rescale` what one forward of the whole batch would have left. There a
  /// module whose batch_norm was not seen (compiled, SyncBatchNorm, cast buffers) has moved with each of the k pieces, by
  /// a momentum of 1 - (1 - m)^(1/k), or without one by the k-th part of a batch's share in the mean of all: without the
  /// variance between pieces. The number of batches goes up by one for a step either way. May be called twice.
  void finish();
  /// Gives the modules back what they had before the first piece.
  void after_step() noexcept;

 private:
  /// Of the values of each channel.
  struct Moments {
    double count = 0;
    at::Tensor mean;
    at::Tensor squares;  ///< sum of squared deviations from it
  };
  struct Held {
    const BatchNormModule* module = nullptr;
    BatchNormState before;
    BatchNormBuffers buffers;
    BatchNormBuffers copies;  ///< from before the step, or from behind its first piece (`freeze`)
    double seen = 0;          ///< batches before this step, where there is no momentum
    std::vector<Moments> calls;  ///< over the pieces, for each time that a piece calls the module
  };
  std::string names() const;
  std::string names_of_others() const;
  void warn();
  std::vector<Watched> watch();
  /// @throws c10::ValueError under `refuse` if one of `pieces` changed what was watched
  void look(const std::vector<Watched>& watched, int64_t pieces);
  void hold();
  static void change(const Held& held, int64_t piece, int64_t pieces);
  void copy_buffers();
  /// Nothing where nothing is to be noted.
  std::shared_ptr<detail::NormCalls> before_piece(int64_t piece, int64_t pieces);
  void after_piece(int64_t piece, const detail::NormCalls* calls);
  void note(const detail::NormCalls& calls);
  static void add(Moments& moments, Moments piece);
  static void write(const Held& held, detail::NormPuts& puts);

  BatchNormPolicy policy_;
  std::vector<BatchNormModule> modules_;
  std::vector<BatchNormModule> others_;  ///< of other classes
  std::vector<bool> seen_;               ///< which of them changed their statistics
  int64_t looks_left_ = 0;
  std::vector<Held> held_;
  bool warned_ = false;
  bool warned_of_others_ = false;
};

}  // namespace brimful
