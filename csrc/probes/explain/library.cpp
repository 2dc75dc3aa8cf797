#include <algorithm>
#include <array>
#include "base/format.h"
#include "probes/explain/library_need.h"
#include "probes/explain/parts.h"

namespace brimful::probes {
namespace {

// A kernel of the library did not run, or an internal call failed: the libraries give the same status for a context that
// an earlier kernel broke, for a call that the GPU does not support, and for a workspace that found no room.
constexpr std::array<std::string_view, 10> kVague{"CUBLAS_STATUS_EXECUTION_FAILED",
                                                  "CUBLAS_STATUS_INTERNAL_ERROR",
                                                  "CUDNN_STATUS_EXECUTION_FAILED",
                                                  "CUDNN_STATUS_INTERNAL_ERROR",
                                                  "CUSOLVER_STATUS_EXECUTION_FAILED",
                                                  "CUSOLVER_STATUS_INTERNAL_ERROR",
                                                  "CUSPARSE_STATUS_EXECUTION_FAILED",
                                                  "CUSPARSE_STATUS_INTERNAL_ERROR",
                                                  "CUFFT_EXEC_FAILED",
                                                  "CUFFT_INTERNAL_ERROR"};

/// What a status means, by what is known of the free memory.
struct Meaning {
  const char* cause_with_room;
  const char* cause_unknown;
  const char* remedy_with_room;
  const char* remedy_prefix;  ///< where it is unknown
};
constexpr Meaning kNoHandle{
    "a library could not start or has no engine for this call, and memory is not short",
    "a library could not start or has no engine for this call: often an OOM in disguise; how much "
    "was free is not known",
    "check that driver, CUDA, cuDNN and torch fit together (`brimful doctor`), and that no earlier "
    "kernel failed: run once with CUDA_LAUNCH_BLOCKING=1",
    ""};
constexpr Meaning kNotRun{
    "a library's kernel failed, and memory is not short: an earlier kernel broke the context, or "
    "the "
    "GPU does not support the call's shapes or dtypes",
    "a library's kernel failed: an earlier kernel broke the context, the GPU does not support the "
    "call's shapes or dtypes, or its workspace found no memory; how much was free is not known",
    "run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU, which names a kernel that failed before",
    "run once with CUDA_LAUNCH_BLOCKING=1, or on the CPU, which names a kernel that failed "
    "before; "};

}  // namespace

bool is_vague_status(std::string_view text) {
  return std::any_of(kVague.begin(), kVague.end(),
                     [&](std::string_view status) { return contains(text, status); });
}

Explanation explain_library(const ErrorText& error, const ErrorEvidence& evidence, bool certain) {
  Explanation out;
  const Meaning& meaning = is_vague_status(error.text) ? kNotRun : kNoHandle;
  const auto need = need_of(error.text, evidence);
  const bool is_short = evidence.free_bytes && *evidence.free_bytes < need.bytes;
  add_bytes(out.evidence, "free on the device before the call", evidence.free_bytes);
  if (evidence.free_bytes) {
    out.evidence.push_back("the call needs: " + format_bytes(need.bytes) + " (" + need.text + ")");
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
    return out;
  }
  out.kind = "library";
  if (evidence.free_bytes) {
    out.is_memory = false;
    out.cause = meaning.cause_with_room;
    out.remedy = meaning.remedy_with_room;
    return out;
  }
  out.cause = meaning.cause_unknown;
  out.remedy =
      std::string(meaning.remedy_prefix) +
      "see how much is free just before (torch.cuda.mem_get_info()), or run the step under "
      "brimful.op_ring(), which notes it";
  return out;
}

Explanation explain_nccl(const ErrorText& error) {
  Explanation out;
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
  return out;
}

}  // namespace brimful::probes
