#pragma once
#include <brimful/step/kept_batch.h>
#include <brimful/step/transaction.h>

#include <utility>
#include <vector>

namespace brimful {

/// What work that may be repeated finds as it was: buffers, random numbers, and what it changes of the caller's batch. Of
/// one unit of work at a time. Not thread-safe.
class Undo {
 public:
  explicit Undo(Transaction transaction) : transaction_(std::move(transaction)) {}

  /// Before the work. `reused`: what the batch consists of, if it may be repeated.
  void capture(std::vector<NamedTensor> reused,
               KeptBatch::Copies copies = KeptBatch::Copies::known) {
    transaction_.capture();
    captured_ = true;
    if (!reused.empty()) {
      batch_.begin(std::move(reused), copies);
    }
  }
  /// Before the work is repeated, and after it where nothing of it shall stay. Nothing where nothing was captured.
  void restore() {
    restore_model();
    batch_.restore();
  }
  /// All but the batch.
  void restore_model() {
    if (captured_) {
      transaction_.restore();
    }
  }
  /// The work is over.
  void release() {
    captured_ = false;
    batch_.end();
  }

  Transaction& transaction() { return transaction_; }
  KeptBatch& batch() { return batch_; }

 private:
  Transaction transaction_;
  KeptBatch batch_;
  bool captured_ = false;
};

}  // namespace brimful
