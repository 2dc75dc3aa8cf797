#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "bindings/bindings.h"

namespace brimful {

/// The stages' threads of a pipeline, as Python knows them.
class PythonThreads {
 public:
  void add(unsigned long ident) {
    const std::lock_guard lock(mutex_);
    idents_.push_back(ident);
  }
  void remove(unsigned long ident) {
    const std::lock_guard lock(mutex_);
    std::erase(idents_, ident);
  }
  /// Each raises it before its next line of Python; null: no more. With the GIL held.
  void raise_in_each(PyObject* type) {
    const std::lock_guard lock(mutex_);
    for (const auto ident : idents_) {
      PyThreadState_SetAsyncExc(ident, type);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<unsigned long> idents_;
};

/// A stage's thread keeps its Python state: making one for every call would cost more than the call.
class PythonThread {
 public:
  explicit PythonThread(std::shared_ptr<PythonThreads> threads)
      : threads_(std::move(threads)),
        ensured_(PyGILState_Ensure()),
        ident_(PyThread_get_thread_ident()),
        state_(PyEval_SaveThread()) {
    threads_->add(ident_);
  }
  ~PythonThread() {
    threads_->remove(ident_);
    if (Py_IsInitialized() != 0) {
      PyEval_RestoreThread(state_);
      PyGILState_Release(ensured_);
    }
  }
  PythonThread(const PythonThread&) = delete;
  PythonThread& operator=(const PythonThread&) = delete;

 private:
  std::shared_ptr<PythonThreads> threads_;
  PyGILState_STATE ensured_;
  unsigned long ident_;
  PyThreadState* state_;
};

}  // namespace brimful
