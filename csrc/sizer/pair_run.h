#pragma once
#include <brimful/sizer/grad_scaler.h>
#include <brimful/sizer/pairs.h>
#include <brimful/step/step.h>
#include <brimful/step/transaction.h>

#include <vector>

#include "ladder/surroundings.h"
#include "sizer/pair_layout.h"
#include "step/prologue.h"

namespace brimful {

/// A step over pairs: embeddings of all pieces without a graph, gathered over the ranks; the loss and its gradients, once;
/// and then the pieces again, whose backward begins with these gradients. It comes before the pieces of an attempt, and is
/// what they run.
class PairRun final : public Prologue {
 public:
  struct Around {
    StepGroup& group;
    Transaction& transaction;
    KeptBatch& batch;
    c10::Device device;
    GradScaler* scaler;  ///< null, or not enabled: none
    bool checks;  ///< that the work is what it must be; costs one more evaluation of the loss
  };
  /// All of them outlive it.
  PairRun(const PairWork& work, const Around& around) : work_(work), around_(around) {}

  void begin_attempt(const std::vector<int64_t>& split);
  bool run() override;
  bool has_met() const override { return stage_ != Stage::alone; }
  void leave(Status verdict) override;
  std::chrono::steady_clock::duration waited() const override { return waited_; }

  /// The pieces of the attempt.
  PieceWork pieces();
  /// The loss was under way when the attempt ended: no split makes it smaller.
  bool in_loss() const { return in_loss_; }
  /// Each loss of the attempt; waits for their device.
  std::vector<double> losses() const;
  /// @throws c10::ValueError on all ranks where the loss is not the same on each, or not finite
  void require_alike(const std::vector<ControlRecord>& records) const;

 private:
  /// What the attempt's collectives have come to.
  enum class Stage : uint8_t { alone, met, gathered, done };
  /// Parameters that the loss uses by itself, with their gradients.
  struct Beside {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> gradients;
  };
  bool scales() const { return around_.scaler != nullptr && around_.scaler->enabled(); }
  bool shares_gradients() const;
  template <typename Collective>
  auto timed(const Collective& collective);
  Towers embed(int64_t begin, int64_t end);
  void embed_all();
  int64_t bad_rows() const;
  bool meet();
  Towers gather();
  Towers gathered(const std::vector<at::Tensor>& blobs) const;
  at::Tensor evaluate(const Towers& all);
  void differentiate(const Towers& all);
  void take_gradients(const Towers& all, std::vector<at::Tensor> gradients);
  void require_stable(const Towers& all) const;
  std::vector<at::Tensor> parameters_of(const at::Tensor& loss, const Towers& all,
                                        uint64_t since) const;
  void share_gradients();
  PieceLoss second(int64_t begin, int64_t end);
  void require_same(const Towers& towers, int64_t begin, int64_t end) const;

  const PairWork& work_;
  Around around_;
  std::vector<int64_t> split_;
  std::vector<ladder::GeneratorStates> states_;  ///< before each piece
  pairs::Form form_;
  Towers own_;  ///< this rank's embeddings
  pairs::Meeting meeting_;
  Stage stage_ = Stage::alone;
  bool in_loss_ = false;
  std::chrono::steady_clock::duration waited_{};
  std::vector<at::Tensor> values_;  ///< of the losses
  at::Tensor value_;                ///< their sum
  std::vector<at::Tensor> seeds_;   ///< by tower: gradients of the loss with respect to own rows
  Beside beside_;
  size_t next_piece_ = 0;
};

}  // namespace brimful
