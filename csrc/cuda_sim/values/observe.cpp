// Values of a device without arithmetic. When this library is loaded, each call of an operator is watched: what comes from
// the host as integers, and what follows from it and from constants, is computed by the host's kernels and kept.
#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <malloc.h>

#include <memory>
#include <mutex>

#include "../operators/backend.h"
#include "../runtime/sim_cuda.h"
#include "call.h"
#include "reads.h"

namespace sim_values {
namespace {

/// Memory that torch's allocator takes back is another tensor's next. It has its devices once a tensor is there.
void forget_what_is_freed() {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  try {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
      if (entry.action_ == TraceEntry::FREE_COMPLETED) {
        sim_cuda_forget(reinterpret_cast<void*>(entry.addr_), entry.size_);
      }
    });
  } catch (const std::exception&) {
    // An allocator of another kind: results of operators are set anyway.
  }
}

/// What is done here is no part of the program: no mode, no other observer and no autograd sees it.
struct Unseen {
  sim_operators::BackendOnly only;
  at::RecordFunctionGuard unrecorded{/*is_enabled=*/false};
};

struct Watched : at::ObserverContext {
  std::unique_ptr<Call> call;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  Called::enter(function.name());
  const Unseen unseen;
  auto watched = std::make_unique<Watched>();
  try {
    const auto name = function.operator_name();
    const Operator* op = name ? find_operator(*name) : nullptr;
    if (op != nullptr && op->kind != Kind::none) {
      watched->call = std::make_unique<Call>(*op, function.inputs());
    }
  } catch (const std::exception&) {  // not known
  }
  return watched;
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  Called::leave();
  auto* const watched = static_cast<Watched*>(context);
  if (watched == nullptr || !watched->call) {
    return;
  }
  static std::once_flag once;
  std::call_once(once, forget_what_is_freed);
  const Unseen unseen;
  try {
    watched->call->finish(function.outputs());
  } catch (const std::exception&) {
  }
  watched->call.reset();
}

const bool installed = [] {
  // Each result is computed beside its place and freed at once. glibc before 2.38 does not use an aligned block of its heap
  // again for one of the same size: it has them of the system, and gives them back.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  watch_reads();
  at::addGlobalCallback(at::RecordFunctionCallback(&begin, &end)
                            .needsInputs(true)
                            .needsOutputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
  return true;
}();

}  // namespace
}  // namespace sim_values
