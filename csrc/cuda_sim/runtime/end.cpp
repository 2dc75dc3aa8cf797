// A program's end. Python before 3.14 ends a thread that asks for its lock while it goes away by unwinding the thread's
// stack, which ends the process where that meets C++ that may not be left: an autograd thread of torch's that has not yet
// forgotten the last backward. A device that computes leaves it the time; here such a thread waits for the end, as by 3.14.
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <initializer_list>

namespace {

std::terminate_handler otherwise = nullptr;

bool python_goes_away() {
  for (const char* name : {"Py_IsFinalizing", "_Py_IsFinalizing"}) {
    if (auto* const asked = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, name))) {
      return asked() != 0;
    }
  }
  return false;
}

[[noreturn]] void wait_for_the_end() {
  const bool is_main = syscall(SYS_gettid) == getpid();
  if (!is_main && std::current_exception() == nullptr && python_goes_away()) {
    setenv("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0", 0);  // torch else waits ten seconds for it
    for (;;) {
      pause();
    }
  }
  if (otherwise != nullptr) {
    otherwise();
  }
  std::abort();
}

const bool kept = (otherwise = std::set_terminate(&wait_for_the_end), true);

}  // namespace
