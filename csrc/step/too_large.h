#pragma once
#include <brimful/error.h>
#include <brimful/export.h>
#include <brimful/step/outcome.h>
#include <brimful/step/standing_bytes.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "memory/others.h"

/// The error when a batch does not fit: what it says, as functions on plain data.
namespace brimful {

struct Shortfall {
  enum class Of : uint8_t {
    split,
    lockstep,   ///< no rank may split further by itself
    optimizer,  ///< its step, after any split; nothing was tried
    mapping,    ///< inference, in pieces
    stages,     ///< of a pipeline, whose pieces are microbatches
    pairs       ///< the loss over all pairs, which no split makes smaller
  };
  Of of = Of::split;
  int rank = 0;
  int world_size = 1;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int64_t rows = 0;
  int64_t max_retries = 0;
  bool trains = true;     ///< else there are no gradients, and no optimizer
  bool may_split = true;  ///< batch_norm: refuse allows none
  bool is_fixed = false;  ///< the schedule of a pipeline, with its number of microbatches
  std::string where;      ///< of a pipeline, the action that ran out of memory
  std::vector<std::string> on_stage;      ///< what to do about its stage
  std::vector<AttemptNote> attempts;      ///< the last one is that which failed the step
  std::optional<StandingBytes> standing;  ///< nothing: not known
  int64_t used_bytes = 0;                 ///< with the work's tensors gone, gradients still there
  int64_t optimizer_bytes = 0;            ///< beyond those: gradients to come and the optimizer
  int64_t rows_done = 0;                  ///< of a mapping
  std::optional<int64_t> limit_bytes;
  memory::HeldByOthers others;
  bool state_may_leave = false;  ///< the optimizer's state could lie elsewhere, and is not asked to
  bool autocast = false;         ///< on around the step
  bool fragmented = false;  ///< the last refusal was for want of one piece; too_large() finds it
  bool ladder_off = false;  ///< single rows could be recomputed and offloaded, and are not asked to
  bool climbed = false;     ///< single rows were recomputed and offloaded as far as they can be
  std::string last_error;
};

/// With what a device holds now; `standing_bytes` may be empty.
Shortfall shortfall_on(c10::Device device, const std::function<StandingBytes()>& standing_bytes);
/// Only what may help here, the cheapest that frees much first.
BRIMFUL_API std::vector<std::string> advice_for(const Shortfall& shortfall);
BRIMFUL_API TooLargeFacts facts_of(const Shortfall& shortfall);
BRIMFUL_API std::string to_string(const Shortfall& shortfall, const TooLargeFacts& facts);
/// The error of both.
BatchTooLarge too_large(Shortfall shortfall);

}  // namespace brimful
