#pragma once
#include <brimful/export.h>
#include <brimful/step/control_record.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brimful {

/// What a rank has seen of how the loss of its batch is composed, and what the ranks make of it together. Rules are bits, by
/// their place in a list that is the same for batches of one kind.
struct BRIMFUL_API RuleVote {
  uint32_t kind = 0;               ///< of the batch; 0: this rank has none
  uint64_t agreeing = 0;           ///< rules that agree with what was seen
  bool knows = false;              ///< false: this rank does not know, and follows the others
  std::vector<std::string> names;  ///< of the rules
  int64_t runs = 0;                ///< forwards and backwards that the trial took, of few rows
  double ms = 0;                   ///< that it took
  int64_t chosen = -1;             ///< the rule of the step; -1: no rank knows

  void put(ControlRecord& record) const;
  /// With every rank's record, or none where the ranks were not asked. All ranks of a kind choose the same rule.
  /// @throws c10::ValueError on all ranks if what two of them saw excludes each other
  void settle(const std::vector<ControlRecord>& records);
};

/// Whether any rank knows.
BRIMFUL_API bool is_voted(const std::vector<ControlRecord>& records);

}  // namespace brimful
