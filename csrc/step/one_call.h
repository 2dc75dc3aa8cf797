#pragma once
#include <c10/util/Exception.h>

#include <atomic>
#include <thread>

namespace brimful {

/// Keeps all but one call out of a sizer, or of what else steps, at a time.
class OneCall {
 public:
  /// `of`: a word for what is called, in messages; it outlives this.
  explicit OneCall(const char* of = "sizer") : of_(of) {}

  class Entered {
   public:
    /// @throws c10::ValueError if a call is under way; nothing has changed then
    Entered(OneCall& calls, const char* call) : calls_(calls) {
      std::thread::id inside;
      const bool entered =
          calls.inside_.compare_exchange_strong(inside, std::this_thread::get_id());
      TORCH_CHECK_VALUE(entered || inside != std::this_thread::get_id(),
                        "step is running already; a step cannot contain another one of the same ",
                        calls.of_, " (call: ", call, ")");
      TORCH_CHECK_VALUE(entered, "another thread is in a call of this ", calls.of_,
                        " (call: ", call, "); call a ", calls.of_, " from one thread at a time");
    }
    ~Entered() { calls_.inside_ = std::thread::id(); }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    OneCall& calls_;
  };

 private:
  const char* of_;
  std::atomic<std::thread::id> inside_;
};

}  // namespace brimful
