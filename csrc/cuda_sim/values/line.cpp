// The functions of Python are those of the process, which need no headers. torch's own tracebacks import its compiler first.
#include "line.h"

#include <dlfcn.h>

namespace sim_values {
namespace {

template <class Function>
Function* function(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

/// A function of Python's by its name.
#define SIM_PYTHON(name, ...) static auto* const name = function<__VA_ARGS__>(#name)

bool is_torchs(const std::string& file) {
  return file.find("/site-packages/torch/") != std::string::npos;
}

/// A frame's file and line. Python's objects are passed as they are.
std::string place_of_frame(void* frame, std::string* file) {
  SIM_PYTHON(PyFrame_GetCode, void*(void*));
  SIM_PYTHON(PyFrame_GetLineNumber, int(void*));
  SIM_PYTHON(PyObject_GetAttrString, void*(void*, const char*));
  SIM_PYTHON(PyUnicode_AsUTF8AndSize, const char*(void*, long*));
  SIM_PYTHON(PyErr_Clear, void());
  SIM_PYTHON(Py_DecRef, void(void*));
  void* const code = PyFrame_GetCode(frame);
  void* const name = PyObject_GetAttrString(code, "co_filename");
  const char* const text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, nullptr);
  *file = text == nullptr ? "?" : text;
  PyErr_Clear();
  Py_DecRef(name);
  Py_DecRef(code);
  return *file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
}

/// With Python's lock.
std::string innermost_line() {
  SIM_PYTHON(PyThreadState_Get, void*());
  SIM_PYTHON(PyThreadState_GetFrame, void*(void*));
  SIM_PYTHON(PyFrame_GetBack, void*(void*));
  SIM_PYTHON(Py_DecRef, void(void*));
  std::string file, line = "?";
  void* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr) {
    line = place_of_frame(frame, &file);
    void* const outer = is_torchs(file) ? PyFrame_GetBack(frame) : nullptr;
    Py_DecRef(frame);
    frame = outer;
  }
  return line;
}

}  // namespace

std::string line_of_python() {
  SIM_PYTHON(Py_IsInitialized, int());
  SIM_PYTHON(PyGILState_GetThisThreadState, void*());
  SIM_PYTHON(PyGILState_Ensure, int());
  SIM_PYTHON(PyGILState_Release, void(int));
  SIM_PYTHON(PyErr_Occurred, void*());
  if (Py_IsInitialized == nullptr || Py_IsInitialized() == 0 ||
      PyGILState_GetThisThreadState() == nullptr) {
    return "?";
  }
  const int lock = PyGILState_Ensure();
  const std::string line = PyErr_Occurred() == nullptr ? innermost_line() : "?";
  PyGILState_Release(lock);
  return line;
}

}  // namespace sim_values
