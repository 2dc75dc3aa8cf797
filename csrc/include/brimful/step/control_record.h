#pragma once
#include <brimful/error.h>
#include <brimful/export.h>

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace brimful {

/// Whether a rank has a batch for the next step.
enum class Next : uint8_t { unknown, yes, no };

/// What each rank sends to all others with its last bucket. Doubles travel as their eight bytes, so they arrive bit-equal.
/// The ranks of a step over pairs exchange it before their pieces too, with meanings of its fields of their own.
struct ControlRecord {
  Status verdict = Status::silent;
  Next next = Next::unknown;
  /// This rank asks all to stop after this step (stop.h): 1 + the signal's number; 0: it does not. 6 bits, beside
  /// `next`.
  uint8_t stop = 0;
  bool regroup = false;      ///< this rank asks all to form a new group after this step (stop.h)
  uint16_t next_pieces = 1;  ///< pieces that this rank wants for its next batch (used in lockstep)
  double weight = 0;         ///< of this step on this rank; kLateWeight: a device has it
  double loss_sum = 0;       ///< sum over pieces of mean loss times weight
  double next_weight =
      std::numeric_limits<double>::quiet_NaN();  ///< of the next step; NaN: not known
  uint32_t ref =
      0;  ///< what the ranks must have alike, such as the number that they divide losses by
  /// From the step's begin until its last bucket was launched, by the host's clock, without others' waits; 0 of a rank that
  /// did not finish its pieces. On CUDA the device's time of the step before, which is known without a wait; in the first
  /// step the host's, and NaN where the device does not say.
  float work_ms = 0;
  uint32_t plan = 0;  ///< rank 0: number of a bucket plan that all ranks take up next; else 0
  /// Of a few parameters, spread over the model, since the last step that stood: 1: its values are others; 0: nothing
  /// wrote it, though its gradient was not zero; 2: neither is known. All 3: this rank's updates are not compared.
  std::array<uint8_t, 8> updated{};
};

constexpr double kLateWeight = std::numeric_limits<double>::quiet_NaN();

/// No byte is free. Other exchanges of the reducer are as long: gloo ends a process whose peer sends another size.
constexpr int64_t kRecordBytes = 48;
constexpr int64_t kUpdatedOffset = 40;
constexpr int64_t kLossSumOffset = 12;  ///< of the eight bytes of loss_sum
using RecordBytes = std::array<uint8_t, kRecordBytes>;

BRIMFUL_API RecordBytes encode(const ControlRecord& record);
BRIMFUL_API ControlRecord decode(std::span<const uint8_t, kRecordBytes> bytes);
/// Of bytes that begin with one.
inline ControlRecord decode_first(std::span<const uint8_t> bytes) {
  return decode(bytes.first<kRecordBytes>());
}

/// The severest verdict of all ranks.
BRIMFUL_API Status worst(const std::vector<ControlRecord>& records);
/// Ranks whose verdict it is.
BRIMFUL_API std::vector<int> ranks_with(const std::vector<ControlRecord>& records, Status verdict);
/// NaN where a device has one of them.
BRIMFUL_API double total_weight(const std::vector<ControlRecord>& records);
BRIMFUL_API bool has_late_weight(const std::vector<ControlRecord>& records);
/// Of the ranks that know theirs.
BRIMFUL_API double known_weight(const std::vector<ControlRecord>& records);
/// Weighted mean loss over all ranks; 0 where the total weight is 0.
BRIMFUL_API double mean_loss(const std::vector<ControlRecord>& records);
/// Sum of the announced weights of the next step; NaN where a rank does not know its own.
BRIMFUL_API double next_total_weight(const std::vector<ControlRecord>& records);
/// True if no rank has, or may have, another batch.
BRIMFUL_API bool no_rank_continues(const std::vector<ControlRecord>& records);
/// True if no rank makes a next step: no_rank_continues(), or stops().
BRIMFUL_API bool no_rank_steps(const std::vector<ControlRecord>& records);
/// What a record's `stop` is now.
BRIMFUL_API uint8_t stop_to_send() noexcept;
/// True if a rank asks all to stop (what `stop` of its record says); this process has then been asked, too.
BRIMFUL_API bool learn_stop(uint8_t stop) noexcept;
BRIMFUL_API bool stops(const std::vector<ControlRecord>& records);
/// True if a rank asks all to form a new group.
BRIMFUL_API bool regroups(const std::vector<ControlRecord>& records);
/// Whose buffers win in the next step: the lowest rank's that announced a batch for it; where none did, the lowest
/// rank's that had one in this step and may have another.
BRIMFUL_API int next_buffer_source(const std::vector<ControlRecord>& records);

/// The most that a rank wants, for the next step; of an attempt that is repeated those that ran out, for its repetition.
BRIMFUL_API int64_t wanted_pieces(const std::vector<ControlRecord>& records);

/// Different for different numbers, but for one pair in four thousand million.
BRIMFUL_API uint32_t fingerprint(double value);
/// Ranks whose `ref` is not that of rank 0.
BRIMFUL_API std::vector<int> ranks_with_another_ref(const std::vector<ControlRecord>& records);
/// True unless one rank updated a parameter that another one should have updated and did not.
BRIMFUL_API bool updated_alike(const std::vector<ControlRecord>& records);

}  // namespace brimful
