#pragma once
#include <brimful/export.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace brimful {

/// How a rank's part of a step ended, in the order of severity.
enum class Status : uint8_t {
  silent,  ///< not said yet
  ok,
  no_data,        ///< as ok, on a rank without a batch
  peer_failed,    ///< another rank failed, which says so itself
  retry,          ///< the step is worth another attempt
  out_of_memory,  ///< and nothing is left to split or to retry
  error,
};
constexpr bool is_failure(Status status) {
  return status >= Status::out_of_memory;
}
/// Why a rank could not do its part of a step: Status::out_of_memory or Status::error.
using FailureKind = Status;

/// A rank failed the step, and every rank of the step raises: parameters, buffers and RNG are as before it.
class BRIMFUL_API RankFailed : public c10::Error {
 public:
  RankFailed(int rank, int64_t step, FailureKind kind, const std::string& message);
  /// The lowest rank that failed, or -1 where the process group broke and no rank posted a failure.
  int rank() const { return rank_; }
  /// The step's number, counted from 0 by the reducer; -1 outside of steps, in a checkpoint.
  int64_t step() const { return step_; }
  FailureKind kind() const { return kind_; }

 private:
  int rank_;
  int64_t step_;
  FailureKind kind_;
};

/// The rank that failed had run out of memory, and nothing was left to split or to retry.
class BRIMFUL_API RankOutOfMemory : public RankFailed {
 public:
  RankOutOfMemory(int rank, int64_t step, const std::string& message);
};

/// A split that was tried.
struct TriedSplit {
  int64_t pieces = 0;
  int64_t piece_rows = 0;  ///< of the largest piece
  int64_t peak_bytes = 0;  ///< of the device meanwhile
};

/// What a rank knew when no split of its batch fitted. Entries that are not known are left out.
struct TooLargeFacts {
  int rank = 0;
  std::string device;
  std::vector<TriedSplit> tried;  ///< oldest first; none where the optimizer's step would not fit
  /// Of the last try's peak, by category; they sum to it: "parameters", "gradients", "optimizer state", "buffers",
  /// "other tensors" (all of them in use before the step but for the gradients), "activations and temporaries" (or "the
  /// optimizer's step": of the peak that it would have).
  std::vector<std::pair<std::string, int64_t>> bytes;
  std::optional<int64_t> limit_bytes;
  /// "this process" (what is no tensor; CUDA: torch's cache), "others", "free".
  std::vector<std::pair<std::string, int64_t>> held;
  std::vector<std::string> advice;  ///< what to try next, in this order
};

/// Raised on the rank for which no split of the batch fits.
class BRIMFUL_API BatchTooLarge : public c10::OutOfMemoryError {
 public:
  explicit BatchTooLarge(const std::string& message, TooLargeFacts facts = {});
  /// Empty where gradients could not be kept for an accumulating step.
  const TooLargeFacts& facts() const { return facts_; }

 private:
  TooLargeFacts facts_;
};

/// The optimizer failed in the middle of its step: parameters may be half updated. Never retried.
class BRIMFUL_API HalfStepError : public c10::Error {
 public:
  explicit HalfStepError(const std::string& message);
};

/// The ranks' models differ in the number, shape, dtype or values of their parameters, or their sizers in the state that
/// they loaded.
class BRIMFUL_API PlanMismatch : public c10::ValueError {
 public:
  explicit PlanMismatch(const std::string& message);
};

namespace detail {
/// Throws RankOutOfMemory or RankFailed by `kind`. A binding may put its own thrower in front (errors that cross the
/// autograd engine keep only types that the engine's caller knows).
[[noreturn]] BRIMFUL_API void throw_rank_failed(int rank, int64_t step, FailureKind kind,
                                                const std::string& message);
using RankFailedThrower = std::function<void(const RankFailed&)>;
BRIMFUL_API void set_rank_failed_thrower(RankFailedThrower thrower);
/// The same for PlanMismatch, where it may cross the autograd engine.
[[noreturn]] BRIMFUL_API void throw_plan_mismatch(const std::string& message);
using PlanMismatchThrower = std::function<void(const PlanMismatch&)>;
BRIMFUL_API void set_plan_mismatch_thrower(PlanMismatchThrower thrower);
}  // namespace detail
}  // namespace brimful
