#pragma once
#include <ATen/record_function.h>

#include <optional>

namespace brimful::pipeline {

/// Sees the operators of its thread that draw random numbers, while it lives.
class DrawWatch {
 public:
  explicit DrawWatch(bool on);
  ~DrawWatch();
  DrawWatch(const DrawWatch&) = delete;
  DrawWatch& operator=(const DrawWatch&) = delete;

  /// Whether this thread has seen one since it was last asked.
  static bool take_seen();

 private:
  std::optional<at::CallbackHandle> handle_;
};

}  // namespace brimful::pipeline
