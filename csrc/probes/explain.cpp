#include <brimful/step/oom.h>
#include <algorithm>
#include "base/format.h"
#include "probes/error_rules.h"
#include "probes/explain_parts.h"
#include "probes/library_need.h"

namespace brimful::probes {
namespace {

std::string first_line(const std::string& text) {
  constexpr size_t kMost = 300;
  const auto begin = text.find_first_not_of("\n ");
  return begin == std::string::npos
             ? ""
             : text.substr(begin, std::min(text.find('\n', begin) - begin, kMost));
}

/// A library's status that may stand for a shortage.
void explain_library(const ErrorText& error, const ErrorEvidence& evidence, bool certain,
                     Explanation& out) {
  const auto need = need_of(error.text, evidence);
  const bool is_short = evidence.free_bytes && *evidence.free_bytes < need.bytes;
  add_bytes(out, "free on the device before the call", evidence.free_bytes);
  if (evidence.free_bytes) {
    out.evidence.push_back("held against what the call needs: " + format_bytes(need.bytes) + " (" +
                           need.words + ")");
  }
  if (evidence.refused) {
    out.evidence.emplace_back("torch's allocator refused a request in the same step");
  }
  if (certain || is_short || evidence.refused) {
    out.kind = "hidden_out_of_memory";
    out.is_memory = true;
    out.cause =
        "this is an OOM in disguise: a library found no memory for its handle or workspace, "
        "beside what torch's allocator holds";
    out.remedy =
        "leave the library room: a smaller batch, torch.cuda.set_per_process_memory_fraction"
        "(0.95), or one small convolution and matrix product before the model fills the "
        "device";
    return;
  }
  out.kind = "library";
  if (evidence.free_bytes) {
    out.is_memory = false;
    out.cause = "a library could not start or has no engine for this call, and memory is not short";
    out.remedy =
        "check that driver, CUDA, cuDNN and torch fit together (`brimful doctor`), and that "
        "no earlier kernel failed: run once with CUDA_LAUNCH_BLOCKING=1";
    return;
  }
  out.cause =
      "a library could not start or has no engine for this call: often an OOM in disguise; "
      "how much was free is not known";
  out.remedy =
      "see how much is free just before (torch.cuda.mem_get_info()), or run the step under "
      "brimful.op_ring(), which notes it";
}

void explain_nccl(const ErrorText& error, Explanation& out) {
  const bool memory = contains(error.text, "out of memory") ||
                      contains(error.text, "Failed to CUDA calloc") ||
                      contains(error.text, "Failed to CUDA host alloc");
  out.kind = memory ? "hidden_out_of_memory" : "collective";
  out.is_memory = memory;
  out.cause = memory ? "NCCL found no memory for its buffers beside what torch's allocator holds"
                     : "NCCL failed; its communicator cannot be used again";
  out.remedy = memory
                   ? "leave it room: a smaller batch, or run one collective before the model fills "
                     "the device; NCCL_BUFFSIZE makes its buffers smaller"
                   : "NCCL_DEBUG=INFO says what failed; check the other ranks' output first";
}

void apply(const ErrorRule& rule, const ErrorEvidence& evidence, Explanation& out) {
  out.kind = rule.kind;
  out.is_memory = rule.is_memory;
  out.cause = rule.cause;
  out.remedy = rule.remedy;
  if (out.kind == "shared_memory") {
    add_bytes(out, "free in /dev/shm now", evidence.shm_free_bytes);
  }
  if (!rule.is_memory && evidence.oom_kills) {
    out.evidence.push_back("kills by the kernel for want of memory in this cgroup: " +
                           std::to_string(*evidence.oom_kills));
    if (*evidence.oom_kills > 0) {
      out.is_memory = true;
    }
  }
}

void explain_other(const ErrorText& error, const ErrorEvidence& evidence, Explanation& out) {
  out.is_memory = false;
  const bool index = contains(error.text, "out of range") || contains(error.text, "out of bounds");
  if (index && !evidence.indices.empty()) {
    out.kind = "index";
    out.cause = evidence.indices.front().words();
    out.remedy = "compare the indices with the size of what they index";
    return;
  }
  out.kind = "other";
  out.cause = "no shortage of memory: " + first_line(error.text);
  out.remedy = "mend what the error says; nothing about memory will help";
}

}  // namespace

bool is_a(const ErrorText& error, std::string_view type) {
  return std::find(error.types.begin(), error.types.end(), type) != error.types.end();
}

void add_bytes(Explanation& out, const char* what, const std::optional<int64_t>& bytes) {
  if (bytes) {
    out.evidence.push_back(std::string(what) + ": " + format_bytes(*bytes));
  }
}

Explanation explain_error(const ErrorText& error, const ErrorEvidence& evidence) {
  Explanation out;
  if (is_a(error, "RankFailed")) {
    out.kind = "other_rank";
    out.is_memory = is_a(error, "OutOfMemoryError");
    out.cause = "another rank failed: " + first_line(error.text);
    out.remedy = "look at that rank's output";
    return out;
  }
  if (is_a(error, "OutOfMemoryError") || is_a(error, "MemoryError")) {
    explain_refusal(error, evidence, out);
    return out;
  }
  const auto shortage = shortage_in(error.text);
  if (contains(error.text, "device-side assert triggered") || assertion_in(error.text)) {
    explain_assertion(error, evidence, out);
  } else if (const auto* rule = rule_for(error.text)) {
    apply(*rule, evidence, out);
  } else if (shortage == Shortage::allocator) {
    explain_refusal(error, evidence, out);
  } else if (shortage == Shortage::outside || shortage == Shortage::unclear) {
    explain_library(error, evidence, shortage == Shortage::outside, out);
  } else if (shortage == Shortage::lost && contains(error.text, "NCCL error")) {
    explain_nccl(error, out);
  } else if (shortage == Shortage::lost && contains(error.text, "CUDA error")) {
    explain_lost(error, evidence, out);
  } else {
    explain_other(error, evidence, out);
  }
  return out;
}

std::string to_text(const Explanation& explanation) {
  const auto* memory = !explanation.is_memory   ? " (memory: perhaps)"
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
