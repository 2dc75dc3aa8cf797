// NVRTC on a device without arithmetic: nothing is compiled. What a program becomes is a module that the simulated driver
// takes, and of which nothing is run.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../driver/made_up_module.h"
#include "without_arithmetic.h"

namespace {

enum { kSuccess = 0, kInvalidInput = 3, kInvalidProgram = 4, kNameNotValid = 10, kInternal = 11 };

struct Program {
  std::vector<std::string> names;
};

/// As nvrtc.h has it for what a program becomes.
int size(void* program, size_t* bytes) {
  *bytes = sizeof sim::kMadeUpModule;
  return program == nullptr ? kInvalidProgram : kSuccess;
}

int made(void* program, char* to) {
  std::memcpy(to, sim::kMadeUpModule, sizeof sim::kMadeUpModule);
  return program == nullptr ? kInvalidProgram : kSuccess;
}

/// torch keeps what NVRTC gives it in a folder of the user's, from which a device with arithmetic would take it.
__attribute__((constructor)) void keep_nothing() {
  setenv("USE_PYTORCH_KERNEL_CACHE", "0", 1);
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return kSuccess;
}

int nvrtcCreateProgram(void** program, const char* source, const char* /*name*/, int /*headers*/,
                       const char* const* /*sources*/, const char* const* /*names*/) {
  if (source == nullptr) {
    return kInvalidInput;
  }
  *program = new Program;
  return kSuccess;
}

int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return kSuccess;
}

int nvrtcCompileProgram(void* program, int /*count*/, const char* const* /*options*/) {
  return program == nullptr ? kInvalidProgram : kSuccess;
}

int nvrtcAddNameExpression(void* program, const char* name) {
  static_cast<Program*>(program)->names.emplace_back(name);
  return kSuccess;
}

/// A name stays what it is.
int nvrtcGetLoweredName(void* program, const char* name, const char** lowered) {
  for (const std::string& known : static_cast<Program*>(program)->names) {
    if (known == name) {
      *lowered = known.c_str();
      return kSuccess;
    }
  }
  return kNameNotValid;
}

int nvrtcGetCUBINSize(void* program, size_t* bytes) {
  return size(program, bytes);
}

int nvrtcGetCUBIN(void* program, char* to) {
  return made(program, to);
}

int nvrtcGetPTXSize(void* program, size_t* bytes) {
  return size(program, bytes);
}

int nvrtcGetPTX(void* program, char* to) {
  return made(program, to);
}

int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
  *bytes = 1;
  return program == nullptr ? kInvalidProgram : kSuccess;
}

int nvrtcGetProgramLog(void* program, char* to) {
  *to = 0;
  return program == nullptr ? kInvalidProgram : kSuccess;
}

const char* nvrtcGetErrorString(int status) {
  return status == kSuccess ? "NVRTC_SUCCESS" : "not supported by the simulated NVRTC";
}
}

// The rest fails, with its name.
#define SIM_ABSENT(name) SIM_REFUSES(name, kInternal)
#include "absent.inc"
