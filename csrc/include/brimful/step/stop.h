#pragma once
#include <brimful/export.h>

#include <vector>

namespace brimful {

/// Training is to end in good order: all ranks end it after the same step, whichever of them was asked. The request rides in the
/// control record of each step, so that it costs no collective. What a program sees of it is Outcome::stop (and the end of
/// a sizer's loop over batches) and PlainLoop::stop, which are alike on all ranks.
/// From any thread, and from handlers of signals. `signal`: the one that asked; 0: the program.
BRIMFUL_API void request_stop(int signal = 0) noexcept;
/// This process was asked, or has learnt of another rank's request by a step.
BRIMFUL_API bool stop_requested() noexcept;
/// For the process to exit with: 128 + the signal's number, as shells have it and launchers expect it (SIGTERM: 143); 0 where
/// the program asked, and without a request. After a step that stops the same on all ranks.
BRIMFUL_API int stop_exit_code() noexcept;
/// Training goes on: for a program that trains again in this process. On all ranks, between two steps.
BRIMFUL_API void clear_stop() noexcept;
/// Each of the signals becomes a request. When it comes once more it does what it did before this call.
/// @throws c10::ValueError if the system does not let a signal be handled; those before it in the list are
BRIMFUL_API void stop_on(const std::vector<int>& signals);

/// All ranks are to form a new group after the same step (Outcome::regroup), whichever of them was asked: a rank wants to
/// join. Rides in the control record as a request to stop does. From any thread.
BRIMFUL_API void request_regroup() noexcept;
BRIMFUL_API bool regroup_requested() noexcept;
/// A new group has formed.
BRIMFUL_API void clear_regroup() noexcept;

}  // namespace brimful
