#pragma once
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/callbacks.h"

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
  // With the GIL held.

  /// Where a signal's handler raises, the stages do before their next line of Python.
  /// @throws what it raises
  void check_signals() {
    if (PyErr_CheckSignals() != 0) {
      raised_ = true;
      raise_in_each(PyExc_KeyboardInterrupt);
      throw py::error_already_set();
    }
  }
  /// They need not any more at a call's end, if their work has ended.
  struct Calm {
    PythonThreads& threads;
    std::function<bool()> has_ended;
    ~Calm() {
      if (std::exchange(threads.raised_, false) && has_ended()) {
        threads.raise_in_each(nullptr);
      }
    }
  };

 private:
  void raise_in_each(PyObject* type) {
    const std::lock_guard lock(mutex_);
    for (const auto ident : idents_) {
      PyThreadState_SetAsyncExc(ident, type);
    }
  }

  std::mutex mutex_;
  std::vector<unsigned long> idents_;
  bool raised_ = false;
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
      or_stop_at_exit([&] { PyEval_RestoreThread(state_); });
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

/// While it lives, its thread sees a caller's context variables: in a copy of its own, since one thread at a time may be in a
/// context.
class CallersContext {
 public:
  explicit CallersContext(const py::object& context) {
    const Gil gil;
    copy_ = PyContext_Copy(context.ptr());
    entered_ = copy_ != nullptr && PyContext_Enter(copy_) == 0;
    PyErr_Clear();
  }
  ~CallersContext() {
    if (Py_IsInitialized() != 0) {
      const Gil gil;
      if (entered_ && PyContext_Exit(copy_) != 0) {
        PyErr_Clear();
      }
      Py_XDECREF(copy_);
    }
  }
  CallersContext(const CallersContext&) = delete;
  CallersContext& operator=(const CallersContext&) = delete;

 private:
  PyObject* copy_ = nullptr;
  bool entered_ = false;
};

/// Of the caller's context as it is now, for each thread of a pipeline.
inline std::function<std::shared_ptr<void>()> scope_of_callers_context() {
  auto context = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
  if (!context) {
    throw py::error_already_set();
  }
  return [kept = shared_object(std::move(context))] {
    return std::make_shared<CallersContext>(*kept);
  };
}

/// Errors of Python hooks and functions inside a backward come as torch's own type.
inline std::exception_ptr translated(std::exception_ptr error) {
  try {
    with_python_errors([&] { std::rethrow_exception(std::move(error)); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;  // not reached: the above throws
}

}  // namespace brimful
