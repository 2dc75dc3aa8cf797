#include "probes/explain/library_need.h"
#include <algorithm>
#include <optional>
#include <regex>
#include <vector>
#include "base/format.h"
#include "base/units.h"
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

// A first handle and the kernels that are loaded for it: the classifier of step/oom.cpp draws the line there too.
constexpr int64_t kHandleBytes = 256 * kMiB;
// As torch 2.11 to 2.15 choose it: for Hopper and later, and before.
constexpr int64_t kBlasBytes = 32 * kMiB;
constexpr int64_t kOlderBlasBytes = int64_t{2} * 4096 * kKiB + int64_t{8} * 16 * kKiB;
constexpr int kHopper = 9;

/// Of ":4096:2:16:8": pairs of KiB and how often. Nothing where torch would not understand it either.
std::optional<int64_t> bytes_of_config(const std::string& config) {
  static const std::regex pair(":([0-9]{1,9}):([0-9]{1,6})");
  std::optional<int64_t> bytes;
  for (std::sregex_iterator at(config.begin(), config.end(), pair), end; at != end; ++at) {
    bytes = bytes.value_or(0) + std::stoll((*at)[1]) * kKiB * std::stoll((*at)[2]);
  }
  return bytes;
}

LibraryNeed blas_workspace(const ErrorEvidence& evidence) {
  if (const auto bytes = bytes_of_config(evidence.cublas_config)) {
    return {*bytes, "workspace, CUBLAS_WORKSPACE_CONFIG=" + evidence.cublas_config};
  }
  const bool is_older = evidence.compute_major && *evidence.compute_major < kHopper;
  return {is_older ? kOlderBlasBytes : kBlasBytes, evidence.compute_major
                                                       ? "workspace, torch's default for this GPU"
                                                       : "workspace, torch's largest default"};
}

/// What cuDNN takes depends on the algorithm that it finds: about as much as the tensors of the call.
std::optional<LibraryNeed> dnn_workspace(const ErrorEvidence& evidence) {
  const auto& all = evidence.operators;
  const auto last = std::find_if(all.rbegin(), all.rend(), [](const OpRecord& op) {
    return op.input_bytes && (contains(op.name, "conv") || contains(op.name, "rnn"));
  });
  if (last == all.rend()) {
    return std::nullopt;
  }
  return LibraryNeed{*last->input_bytes, "workspace, as large as the tensors of " + last->name};
}

}  // namespace

LibraryNeed need_of(const std::string& error, const ErrorEvidence& evidence) {
  if (evidence.workspace_bytes) {
    return {*evidence.workspace_bytes, "workspace_bytes, as given"};
  }
  std::vector<LibraryNeed> parts;
  if (contains(error, "CUBLAS")) {
    parts.push_back(blas_workspace(evidence));
  }
  const bool is_dnn =
      contains(error, "CUDNN") || contains(error, "cuDNN") || contains(error, "engine");
  if (const auto dnn = is_dnn ? dnn_workspace(evidence) : std::nullopt) {
    parts.push_back(*dnn);
  }
  if (contains(error, "NOT_INITIALIZED")) {
    parts.push_back({kHandleBytes, "usual for the first handle and its kernels"});
  }
  if (parts.empty()) {
    return {kHandleBytes, "a usual amount: what this call needs is not known"};
  }
  LibraryNeed need;
  for (const auto& part : parts) {
    need.bytes += part.bytes;
    need.text += (need.text.empty() ? "" : "; ") + format_bytes(part.bytes) + " " + part.text;
  }
  return need;
}

}  // namespace brimful::probes
