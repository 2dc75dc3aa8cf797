// A CUPTI that is not there, for torch.profiler: the real one would look for more of a driver than driver/ has.
extern "C" int cuptiGetResultString(int /*result*/, const char** text) {
  *text = "no CUPTI for simulated devices";
  return 0;
}

constexpr int kNotInitialized = 15;

#define SIM_ABSENT(name)    \
  extern "C" int name() {   \
    return kNotInitialized; \
  }
#include "absent.inc"
