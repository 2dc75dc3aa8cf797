#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace brimful::detail {

/// What went into each module's forward and came out of it: once for the whole batch, and once for each piece. The modules'
/// language reports every call to it. Not thread-safe.
class BRIMFUL_API CallLog {
 public:
  struct Rows {
    int64_t begin = 0;
    int64_t end = 0;
  };

  /// The first run is that of the whole batch. Calls are kept until end_forward(): what is called in backward is a
  /// repetition, by a checkpoint.
  void begin_run(Rows rows);
  void end_forward() { recording_ = false; }

  /// Inputs and outputs are copied: modules may change them in place.
  void enter(const std::string& name, const std::vector<at::Tensor>& inputs);
  void leave(const std::string& name, const std::vector<at::Tensor>& outputs);
  /// Random numbers were drawn. Not `given_again`: the pieces have others than the whole batch had.
  void drew(bool given_again);
  /// Places of rows were drawn: of the whole batch's in its run, of a piece's in others. No numbers could be given again.
  void drew_places();

  int64_t runs() const { return static_cast<int64_t>(runs_.size()); }
  Rows rows() const { return runs_.empty() ? Rows{} : runs_.back().rows; }
  bool recording() const { return recording_; }
  /// The module that runs, if one does.
  std::optional<std::string> current() const;

  /// Of the coarsest floating dtype that modules put out; 0 if none did.
  double coarsest_epsilon() const { return coarsest_epsilon_; }
  /// Modules whose output differs although their input agrees, the innermost ones only; in the order of their calls, without
  /// those whose random numbers differ.
  std::vector<std::string> coupled(double rtol) const;
  const std::vector<std::string>& random() const { return random_; }
  /// Some random numbers could not be given again.
  bool lost_random() const { return lost_random_; }
  /// The loss function drew places of rows, outside of any module.
  bool places_in_loss() const { return places_in_loss_; }

 private:
  struct Call {
    std::string name;
    int64_t nth = 0;      ///< call of this module
    int64_t parent = -1;  ///< the call that it was made in
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    bool left = false;
    bool lost_random = false;
  };
  struct Run {
    Rows rows;
    std::vector<Call> calls;
  };
  struct Inside {
    std::string name;
    int64_t call = -1;
  };
  /// The calls of the pieces that are `call` of the whole batch; empty if one has none.
  std::vector<const Call*> counterparts(const Call& call) const;
  bool agree(const Call& whole, const std::vector<const Call*>& pieces,
             std::vector<at::Tensor> Call::*tensors, bool may_be_mean, double rtol) const;
  std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors);

  std::vector<Run> runs_;
  std::vector<Inside> inside_;
  std::vector<std::string> random_;
  double coarsest_epsilon_ = 0;
  bool recording_ = false;
  bool lost_random_ = false;
  bool places_in_loss_ = false;
  std::vector<std::string> drew_places_;  ///< modules
};

/// Machine epsilon of a floating dtype, 0 of others.
BRIMFUL_API double epsilon_of(c10::ScalarType dtype);

}  // namespace brimful::detail
