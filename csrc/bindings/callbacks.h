#pragma once
#include <string>
#include <utility>

#include "bindings/gil.h"

namespace brimful {

/// Turns a Python error into what the core understands. An out-of-memory error becomes c10::OutOfMemoryError, and its
/// traceback, which pins the tensors of its frames, is dropped; any other travels through the core as it is.
/// Call it inside a handler, with the GIL held.
[[noreturn]] void throw_to_core(py::error_already_set& error);

/// Calls `fn`, which uses Python, from core code: takes the GIL and translates errors.
template <typename Fn>
auto call_python(Fn&& fn) {
  const Gil gil;
  try {
    return std::forward<Fn>(fn)();
  } catch (py::error_already_set& error) {
    throw_to_core(error);
  }
}

}  // namespace brimful
