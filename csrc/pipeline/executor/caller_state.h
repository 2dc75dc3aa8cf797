#pragma once
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>

namespace brimful::pipeline {

/// While a stage's thread works: the caller's state, but backward runs on this thread.
class CallerState {
 public:
  CallerState(const at::ThreadLocalState& caller, bool autocast, bool keep_casts)
      : guard_(caller), autocast_(autocast) {
    at::autocast::set_autocast_cache_enabled(keep_casts);  // the thread-local state lacks it
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    if (autocast_) {  // a scope inside a stage would else be the outermost, and clear the casts of all
      at::autocast::increment_nesting();
    }
  }
  ~CallerState() {
    if (autocast_) {
      at::autocast::decrement_nesting();
    }
  }
  CallerState(const CallerState&) = delete;
  CallerState& operator=(const CallerState&) = delete;

 private:
  at::ThreadLocalStateGuard guard_;
  bool autocast_;
};

}  // namespace brimful::pipeline
