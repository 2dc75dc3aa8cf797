#include <brimful/step/oom.h>
#include <algorithm>
#include "base/format.h"
#include "probes/explain/error_rules.h"
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

Explanation explain_by(const ErrorRule& rule, const ErrorEvidence& evidence) {
  Explanation out;
  out.kind = rule.kind;
  out.is_memory = rule.is_memory;
  out.cause = rule.cause;
  out.remedy = rule.remedy;
  if (out.kind == "shared_memory") {
    add_bytes(out.evidence, "free in /dev/shm now", evidence.shm_free_bytes);
  }
  if (!rule.is_memory.has_value() && evidence.oom_kills) {
    out.evidence.push_back("kills by the kernel because memory ran out in this cgroup: " +
                           std::to_string(*evidence.oom_kills));
    if (*evidence.oom_kills > 0) {
      out.is_memory = true;
    }
  }
  return out;
}

Explanation explain_other(const ErrorText& error, const ErrorEvidence& evidence) {
  Explanation out;
  const bool index = contains(error.text, "out of range") || contains(error.text, "out of bounds");
  if (index && !evidence.indices.empty()) {
    out.kind = "index";
    out.is_memory = false;
    out.cause = to_string(evidence.indices.front());
    out.remedy = "compare the indices with the size of what they index";
    return out;
  }
  out.kind = "other";
  if (index || is_mistake(error.text) || is_mistake_by_type(error)) {
    out.is_memory = false;
    out.cause = "no shortage of memory: " + said_by(error.text);
    out.remedy = "fix what the error says; nothing about memory will help";
    return out;
  }
  out.cause = "an error that brimful does not know: " + said_by(error.text);
  out.remedy =
      "begin with what the error says; where it does not come with a smaller batch, memory is "
      "behind "
      "it";
  return out;
}

// What a database says too, of a column.
constexpr ErrorRule kTooManyElements{
    "integer out of range",
    "",
    "kernel_limit",
    false,
    "a tensor has more elements than a library's 32-bit integers count (2,147,483,647)",
    "a smaller batch; BatchSizer(piece_rows=) keeps the batch and runs it in pieces of at most "
    "that many rows"};

bool has_too_many_elements(const ErrorText& error) {
  return contains(error.text, "RuntimeError: integer out of range") ||
         (is_a(error, "RuntimeError") && error.text.starts_with(kTooManyElements.part));
}

/// The file system is not known where the message names no file: it may be /dev/shm, which is memory.
Explanation explain_full_disk(const ErrorText& error) {
  Explanation out;
  const bool named = contains(error.text, "No space left on device: '/");
  out.kind = named ? "full_disk" : "other";
  out.is_memory = named ? std::optional<bool>(false) : std::nullopt;
  out.cause = (named ? "a disk is full: " : "a file system is full, a disk or /dev/shm: ") +
              said_by(error.text);
  out.remedy =
      named ? "make room on the disk of that file, or write elsewhere"
            : "see which it is (df -h), make room, or write elsewhere; a /dev/shm that is full is "
              "memory: --shm-size=8g for a container, fewer DataLoader workers";
  return out;
}

Explanation explain_other_rank(const ErrorText& error) {
  Explanation out;
  out.kind = "other_rank";
  out.is_memory = is_a(error, "OutOfMemoryError") || is_a(error, "RankOutOfMemory");
  out.cause = "another rank failed: " + said_by(error.text);
  out.remedy = "look at that rank's output";
  return out;
}

}  // namespace

bool is_a(const ErrorText& error, std::string_view type) {
  return std::find(error.types.begin(), error.types.end(), type) != error.types.end();
}

void add_bytes(std::vector<std::string>& evidence, const char* what,
               const std::optional<int64_t>& bytes) {
  if (bytes) {
    evidence.push_back(std::string(what) + ": " + format_bytes(*bytes));
  }
}

Explanation explain_error(const ErrorText& given, const ErrorEvidence& evidence) {
  ErrorText error = given;
  if (error.types.empty()) {
    error.types = types_in(error.text);
  }
  if (const auto* rule = rule_before_types(error.text)) {
    return explain_by(*rule, evidence);
  }
  if (is_a(error, "RankFailed") || is_a(error, "RankOutOfMemory")) {
    return explain_other_rank(error);
  }
  if (is_a(error, "BatchTooLarge") || too_large_in(error.text)) {
    return explain_too_large(error);
  }
  if (is_a(error, "OutOfMemoryError") || is_a(error, "MemoryError")) {
    return explain_refusal(error, evidence);
  }
  const auto shortage = shortage_in(error.text);
  if (contains(error.text, "device-side assert triggered") || assertion_in(error.text)) {
    return explain_assertion(error, evidence);
  }
  if (const auto* rule = rule_for(error.text)) {
    return explain_by(*rule, evidence);
  }
  if (shortage == Shortage::allocator || is_refusal_of_host(error.text)) {
    return explain_refusal(error, evidence);
  }
  if (shortage == Shortage::outside || shortage == Shortage::unclear ||
      (shortage == Shortage::none && is_vague_status(error.text))) {
    return explain_library(error, evidence, shortage == Shortage::outside);
  }
  if (has_too_many_elements(error)) {
    return explain_by(kTooManyElements, evidence);
  }
  if (contains(error.text, "No space left on device")) {
    return explain_full_disk(error);
  }
  if (shortage == Shortage::lost && contains(error.text, "NCCL error")) {
    return explain_nccl(error);
  }
  if (shortage == Shortage::lost && contains(error.text, "CUDA error")) {
    return explain_lost(error, evidence);
  }
  return explain_other(error, evidence);
}

std::string to_string(const Explanation& explanation) {
  const auto* memory = !explanation.is_memory   ? " (memory: not known)"
                       : *explanation.is_memory ? " (memory: yes)"
                                                : " (memory: no)";
  std::string text = explanation.kind + memory + "\n  cause:  " + explanation.cause +
                     "\n  remedy: " + explanation.remedy;
  for (const auto& line : explanation.evidence) {
    text += "\n  - " + line;
  }
  return text;
}

}  // namespace brimful::probes
