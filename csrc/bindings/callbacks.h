#pragma once
#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "bindings/gil.h"

namespace brimful {

/// Whether memory ran out, by an error of Python: its type, then its message and what is free, as the core decides it.
/// RankOutOfMemory, which speaks of another rank, is such an error too. With the GIL held.
bool ran_out_of_memory(const py::handle& error);

/// Turns a Python error into what the core understands. An out-of-memory error becomes c10::OutOfMemoryError, and its
/// traceback, which pins the tensors of its frames, is dropped; any other travels through the core as it is.
/// Call it inside a handler, with the GIL held.
[[noreturn]] void throw_to_core(py::error_already_set& error);
/// The same of an error that torch has thrown, of an operator or a backward: torch may have left it in the thread's state
/// too, out of which it is taken. It takes the GIL.
[[noreturn]] void throw_to_core(python_error& error);

/// Calls `fn`, which uses Python, from core code: takes the GIL and translates errors.
template <typename Fn>
auto call_python(Fn&& fn) {
  const Gil gil;
  try {
    return std::forward<Fn>(fn)();
  } catch (py::error_already_set& error) {
    throw_to_core(error);
  } catch (python_error& error) {
    throw_to_core(error);
  }
}

/// Calls `work`, which runs operators or a backward without the GIL: hooks and functions in the graph may be Python's.
template <typename Work>
auto with_python_errors(Work&& work) -> decltype(work()) {
  try {
    return std::forward<Work>(work)();
  } catch (python_error& error) {
    throw_to_core(error);
  }
}

}  // namespace brimful
