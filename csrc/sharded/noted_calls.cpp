#include "sharded/noted_calls.h"

#include <torch/library.h>

#include <array>
#include <atomic>

namespace brimful {
namespace {
/// No kernel of torch has it, so that all operators but those below fall through it at no cost.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local CallListener* tls_listener = nullptr;
/// Of autograd's threads, which have none of their own: that of the process's last scope.
std::atomic<CallListener*> anyone{nullptr};

void note(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
          std::vector<c10::IValue>* stack) {
  auto* const listener = tls_listener != nullptr ? tls_listener : anyone.load();
  if (listener != nullptr) {
    listener->on_collective(op, *stack);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_more(kKey);  // what it calls itself is its own
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(c10d, TESTING_ONLY_GenericMode, m) {
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
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&note>());
  }
}
}  // namespace

ListeningScope::ListeningScope(CallListener& listener)
    : before_(tls_listener), anyone_before_(anyone.exchange(&listener)), key_(kKey) {
  tls_listener = &listener;
}

ListeningScope::~ListeningScope() {
  tls_listener = before_;
  anyone.store(anyone_before_);
}

}  // namespace brimful
