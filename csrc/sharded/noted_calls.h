#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace brimful {

/// Who is informed of each collective that a step's threads issue, before it is.
class CallListener {
 public:
  virtual ~CallListener() = default;
  /// From any thread of the step, one at a time. What it throws is thrown in the place of the collective. `arguments` lie on top
  /// of the stack.
  virtual void on_collective(const c10::OperatorHandle& op,
                             const std::vector<c10::IValue>& arguments) = 0;
};

/// While it lives, the listener gets the collectives of this thread and of the backwards that it begins: c10d's operators
/// have a kernel of ours, and a dispatch key that no kernel has marks this thread, which autograd's threads take over. Ended
/// by the thread that began it. In a process whose threads are ranks each thread has a listener of its own, on CPU tensors.
class ListeningScope {
 public:
  explicit ListeningScope(CallListener& listener);
  ~ListeningScope();
  ListeningScope(const ListeningScope&) = delete;
  ListeningScope& operator=(const ListeningScope&) = delete;

 private:
  CallListener* before_;
  CallListener* anyone_before_;
  c10::impl::IncludeDispatchKeyGuard mark_;
};

}  // namespace brimful
