// What libraries that compute answer on a device without arithmetic. Their headers declare these functions with arguments,
// so they are defined here under other names.
#pragma once
#include <cstdio>

/// A function that computes, or sets in a descriptor what is not asked for: it is done at once.
#define SIM_ANSWERS(name, status)                 \
  extern "C" int sim_answers_##name() asm(#name); \
  int sim_answers_##name() {                      \
    return status;                                \
  }

/// A function that is not there: it fails, and prints its name.
#define SIM_REFUSES(name, status)                                                       \
  extern "C" int sim_refuses_##name() asm(#name);                                       \
  int sim_refuses_##name() {                                                            \
    std::fprintf(stderr, "simulated CUDA: there is no " #name " without arithmetic\n"); \
    return status;                                                                      \
  }

namespace sim {

/// The major, minor or patch number, as `which` is 0, 1 or 2, of a version such as 91900. Returns false for another one.
inline bool part_of_version(int version, int which, int* value) {
  const int parts[] = {version / 10000, version / 100 % 100, version % 100};
  if (which < 0 || which > 2) {
    return false;
  }
  *value = parts[which];
  return true;
}

}  // namespace sim
