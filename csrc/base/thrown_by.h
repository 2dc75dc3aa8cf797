#pragma once
#include <exception>

namespace brimful {

/// What the function throws; null where it throws nothing.
template <typename Fn>
std::exception_ptr thrown_by(const Fn& fn) {
  try {
    fn();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace brimful
