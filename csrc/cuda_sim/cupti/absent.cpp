// What is not asked for. Without CUPTI's header, whose declarations these are not.
constexpr int kNotInitialized = 15;

#define SIM_ABSENT(name)    \
  extern "C" int name() {   \
    return kNotInitialized; \
  }
#include "absent.inc"
