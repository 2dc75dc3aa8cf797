#include <algorithm>
#include "probes/explain/error_rules.h"
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

constexpr size_t kShownOperators = 8;

void add_operators(std::vector<std::string>& lines, const ErrorEvidence& evidence) {
  const auto& all = evidence.operators;
  const auto shown = std::min(all.size(), kShownOperators);
  for (size_t i = all.size() - shown; i < all.size(); ++i) {
    std::string line = "operator: " + all[i].name + "(";
    for (size_t t = 0; t < all[i].tensors.size(); ++t) {
      line += (t == 0 ? "" : "; ") + all[i].tensors[t];
    }
    lines.push_back(line + ")" + (all[i].where.empty() ? "" : " at " + all[i].where) +
                    (all[i].indices_dropped ? ", its indices were not copied" : ""));
  }
}

}  // namespace

Explanation explain_assertion(const ErrorText& error, const ErrorEvidence& evidence) {
  Explanation out;
  out.is_memory = false;
  out.kind = "device_lost";
  const auto* rule = assertion_in(error.text);
  const bool on_device =
      contains(error.text, "device-side assert") || contains(error.text, "Assertion `");
  if (rule != nullptr) {
    out.kind = rule->kind;
    out.cause = rule->cause;
    if (on_device) {
      out.evidence.push_back("the kernel's assertion: " + std::string(rule->assertion));
    }
  }
  if (!evidence.indices.empty() && out.kind != "value") {
    for (const auto& finding : evidence.indices) {
      out.evidence.push_back(to_string(finding));
    }
    out.kind = "index";
    out.cause = to_string(evidence.indices.front());
  }
  add_operators(out.evidence, evidence);
  if (out.cause.empty()) {
    out.cause =
        "a kernel found its input wrong (as a rule an index or a label out of range), some "
        "calls before the line in the traceback";
  }
  if (rule != nullptr) {
    out.remedy = rule->remedy;
  } else {
    out.remedy =
        out.evidence.empty()
            ? "run the step under brimful.op_ring(), or once on the CPU, which names the line"
            : "compare the indices with the size of what they index (labels with the number "
              "of classes, tokens with the embedding's rows)";
  }
  if (on_device) {
    out.remedy += "; the process must be started again";
  }
  return out;
}

Explanation explain_lost(const ErrorText& error, const ErrorEvidence& evidence) {
  Explanation out;
  out.kind = "device_lost";
  out.is_memory = false;
  add_operators(out.evidence, evidence);
  const bool hardware = contains(error.text, "ECC") || contains(error.text, "NVLink");
  out.cause = hardware ? "the GPU's hardware reported an error that cannot be corrected"
                       : "a kernel broke CUDA's context, perhaps some calls before the line in the "
                         "traceback: every later call fails too";
  out.remedy = hardware
                   ? "reset or replace the GPU (nvidia-smi -q -d ECC); start from a checkpoint"
                   : "start the process again, once with CUDA_LAUNCH_BLOCKING=1 to see the line; "
                     "custom kernels are the first suspects (compute-sanitizer)";
  return out;
}

}  // namespace brimful::probes
