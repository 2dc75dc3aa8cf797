#include "sharded/noted_calls.h"

#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace brimful {
namespace {
/// No kernel of torch has it, so that all operators fall through it at no cost: it only marks the threads of a step.
constexpr auto kMark = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local CallListener* tls_listener = nullptr;
/// A collective that another one calls is its own.
thread_local bool tls_inside = false;
/// Of autograd's threads, which have none of their own: that of the process's last scope.
std::atomic<CallListener*> anyone{nullptr};

void note(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
          std::vector<c10::IValue>* stack) {
  const bool is_marked = !tls_inside && c10::impl::tls_is_dispatch_key_included(kMark);
  auto* const listener = !is_marked                ? nullptr
                         : tls_listener != nullptr ? tls_listener
                                                   : anyone.load();
  if (listener != nullptr) {
    listener->on_collective(op, *stack);
  }
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  const auto as_before =
      c10::make_scope_exit([before = std::exchange(tls_inside, true)] { tls_inside = before; });
  op.redispatchBoxed(keys & below, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

/// In programs without a step of a sharded model collectives are as torch has them. A key below those of Python's modes and
/// tensors, whose handlers are called without any key above them. Stays until the process ends.
void note_from_now_on() {
  static auto* const library = new torch::Library(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const char* const name : {"_allgather_base_",
                                 "_reduce_scatter_base_",
                                 "allgather_",
                                 "allgather_coalesced_",
                                 "allgather_into_tensor_coalesced_",
                                 "allreduce_",
                                 "allreduce_coalesced_",
                                 "alltoall_",
                                 "alltoall_base_",
                                 "barrier",
                                 "broadcast_",
                                 "gather_",
                                 "monitored_barrier_",
                                 "recv_",
                                 "recv_any_source_",
                                 "reduce_",
                                 "reduce_scatter_",
                                 "reduce_scatter_tensor_coalesced_",
                                 "scatter_",
                                 "send"}) {
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&note>());
  }
}
}  // namespace

ListeningScope::ListeningScope(CallListener& listener)
    : before_(tls_listener), anyone_before_(anyone.exchange(&listener)), mark_(kMark) {
  tls_listener = &listener;
  static std::once_flag noted;
  std::call_once(noted, note_from_now_on);
}

ListeningScope::~ListeningScope() {
  tls_listener = before_;
  anyone.store(anyone_before_);
}

}  // namespace brimful
