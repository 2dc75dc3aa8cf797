#pragma once
#include <cxxabi.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"

namespace brimful {

/// Calls `fn`, which may take the GIL. Before Python 3.14 a thread that takes it while the interpreter ends is ended by
/// unwinding its stack, and the destructors on the way would use Python without the GIL, or end the process. It stops here
/// for ever instead, as later releases do.
template <typename Fn>
decltype(auto) or_stop_at_exit(Fn&& fn) {
#if defined(__GLIBCXX__) && PY_VERSION_HEX < 0x030E0000
  try {
    return std::forward<Fn>(fn)();
  } catch (abi::__forced_unwind&) {
    while (true) {
      ::pause();
    }
  }
#else
  return std::forward<Fn>(fn)();
#endif
}

/// Holds the GIL, on any thread, and lets an error be that is set in the thread's state.
class BareGil {
 public:
  BareGil() {
    or_stop_at_exit([this] { held_.emplace(); });
  }

 private:
  std::optional<py::gil_scoped_acquire> held_;
};

/// Holds the GIL, on any thread. An error that torch has left in the thread's state on its way through C++ is put aside
/// meanwhile: Python would take it for one of the next call.
class Gil {
 public:
  Gil() { PyErr_Fetch(&type_, &value_, &trace_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil() {
    if (type_ != nullptr) {
      PyErr_Restore(type_, value_, trace_);
    }
  }

 private:
  BareGil held_;
  PyObject* type_ = nullptr;  ///< with the others: an error that was set before
  PyObject* value_ = nullptr;
  PyObject* trace_ = nullptr;
};

/// An object of Python's that threads without the GIL may let go of.
template <typename T>
std::shared_ptr<T> shared_object(T object) {
  return {new T(std::move(object)), [](T* owned) {
            const Gil gil;
            delete owned;
          }};
}

/// An object whose destructor waits for threads of its own, which may log a line and need the GIL for that.
template <typename T>
std::shared_ptr<T> freed_without_gil(std::shared_ptr<T> object) {
  auto* const same = object.get();
  return {same, [owned = std::move(object)](T*) mutable {
            std::optional<py::gil_scoped_release> no_gil;
            if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
              no_gil.emplace();
            }
            owned.reset();
          }};
}

/// `callable(*args, **keywords)`, by a thread that may outlive the interpreter.
inline py::object call_or_stop_at_exit(const py::object& callable, const py::tuple& args,
                                       const py::dict& keywords = py::dict()) {
  auto* const result =
      or_stop_at_exit([&] { return PyObject_Call(callable.ptr(), args.ptr(), keywords.ptr()); });
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace brimful
