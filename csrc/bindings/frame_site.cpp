// The line of the innermost frame outside torch and brimful, read without the GIL. torch gives the GIL up around its
// operators, so an allocation does not hold it; but no other changes the frames of a thread that is inside a C call, and
// what is read here (a code object's file name, its line table) never changes while a frame runs it.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include "bindings/bindings.h"
#include "memory/moment.h"
#include "memory/sites.h"
#include "memory/tracker.h"
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE
#endif
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#else
#include <internal/pycore_frame.h>
#endif

namespace brimful {
namespace {

using Frame = const _PyInterpreterFrame;

// What differs between versions of CPython.
#if PY_VERSION_HEX >= 0x030D0000
Frame* innermost(const PyThreadState* thread) {
  return thread->current_frame;
}
PyCodeObject* code_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030E0000
  PyObject* const executable = PyStackRef_AsPyObjectBorrow(frame->f_executable);
#else
  PyObject* const executable = frame->f_executable;
#endif
  return executable != nullptr && PyCode_Check(executable)
             ? reinterpret_cast<PyCodeObject*>(executable)
             : nullptr;
}
const _Py_CODEUNIT* instruction_of(Frame* frame) {
  return frame->instr_ptr;
}
#else
Frame* innermost(const PyThreadState* thread) {
  return thread->cframe->current_frame;
}
PyCodeObject* code_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->owner == FRAME_OWNED_BY_CSTACK ? nullptr : frame->f_code;
#else
  return frame->f_code;
#endif
}
const _Py_CODEUNIT* instruction_of(Frame* frame) {
  return frame->prev_instr;
}
#endif

int line_at(PyCodeObject* code, const _Py_CODEUNIT* instruction) {
  const auto unit = static_cast<int>(instruction - _PyCode_CODE(code));
  return PyCode_Addr2Line(code, unit * static_cast<int>(sizeof(_Py_CODEUNIT)));
}

// Not PyUnicode_AsUTF8, which keeps what it makes in the string.
std::string utf8_of(PyObject* text) {
  std::string out;
  if (text == nullptr || !PyUnicode_Check(text)) {
    return out;
  }
  const int kind = PyUnicode_KIND(text);
  const void* const data = PyUnicode_DATA(text);
  for (Py_ssize_t k = 0; k < PyUnicode_GET_LENGTH(text); ++k) {
    const Py_UCS4 letter = PyUnicode_READ(kind, data, k);
    const auto put = [&](Py_UCS4 bits) { out.push_back(static_cast<char>(bits)); };
    const auto tail = [&](int shift) { put(0x80 | (letter >> shift & 0x3f)); };
    if (letter >= 0xd800 && letter < 0xe000) {  // a byte of a file's name that is no UTF-8
      constexpr char kDigits[] = "0123456789abcdef";
      out += "\\x";
      put(static_cast<Py_UCS4>(kDigits[letter >> 4 & 0xf]));
      put(static_cast<Py_UCS4>(kDigits[letter & 0xf]));
    } else if (letter < 0x80) {
      put(letter);
    } else if (letter < 0x800) {
      put(0xc0 | letter >> 6);
      tail(0);
    } else if (letter < 0x10000) {
      put(0xe0 | letter >> 12);
      tail(6);
      tail(0);
    } else {
      put(0xf0 | letter >> 18);
      tail(12);
      tail(6);
      tail(0);
    }
  }
  return out;
}

enum class Owner : uint8_t { user, library, engine };

/// Where libraries' files begin: set once, before the first look.
std::string torch_folder;
std::string brimful_folder;

Owner owner_of(PyCodeObject* code) {
  const std::string file = utf8_of(code->co_filename);
  const std::string_view name = file;
  if (name.starts_with(torch_folder)) {
    return name.ends_with("/autograd/graph.py") && utf8_of(code->co_name) == "_engine_run_backward"
               ? Owner::engine
               : Owner::library;
  }
  const bool is_library = name.starts_with(brimful_folder) || name.starts_with("<frozen ");
  return is_library ? Owner::library : Owner::user;
}

/// A code object may be freed and another made in its place, with its strings in theirs: for code that comes and goes, as a
/// notebook's does, what its file's name says is compared too. torch's code stays.
using FileEnd = std::array<uint64_t, 3>;

FileEnd file_end_of(PyCodeObject* code) {
  FileEnd end{};
  const auto bytes = static_cast<size_t>(PyUnicode_GET_LENGTH(code->co_filename)) *
                     static_cast<size_t>(PyUnicode_KIND(code->co_filename));
  const size_t taken = std::min(bytes, sizeof(end));
  std::memcpy(end.data(),
              static_cast<const char*>(PyUnicode_DATA(code->co_filename)) + bytes - taken, taken);
  return end;
}

struct KnownCode {
  const PyCodeObject* code = nullptr;
  const PyObject* file = nullptr;
  int first_line = 0;
  Owner owner = Owner::user;
  Py_ssize_t units = 0;
  const PyObject* name = nullptr;
  FileEnd file_end{};
  uint32_t number = 0;  // of its own

  bool is(PyCodeObject* other) const {
    return code == other && file == other->co_filename && first_line == other->co_firstlineno &&
           (owner != Owner::user || (units == Py_SIZE(other) && name == other->co_qualname &&
                                     file_end == file_end_of(other)));
  }
};

struct KnownSite {
  const _Py_CODEUNIT* instruction = nullptr;
  uint32_t code = 0;  // KnownCode::number
  uint32_t site = memory::kNoSite;
};

/// What a thread has looked at lately.
struct Known {
  std::array<KnownCode, 512> codes;
  std::array<KnownSite, 512> sites;
  uint32_t numbers = 0;
};

template <typename Entry, size_t kEntries>
Entry& place_of(std::array<Entry, kEntries>& entries, const void* pointer) {
  return entries[(reinterpret_cast<uintptr_t>(pointer) * 0x9e3779b97f4a7c15ULL >> 32) % kEntries];
}

const KnownCode& known_code(Known& known, PyCodeObject* code) {
  KnownCode& entry = place_of(known.codes, code);
  if (!entry.is(code)) [[unlikely]] {
    entry = {code,          code->co_filename, code->co_firstlineno, owner_of(code),
             Py_SIZE(code), code->co_qualname, file_end_of(code),    ++known.numbers};
  }
  return entry;
}

uint32_t known_site(Known& known, const KnownCode& code, PyCodeObject* object,
                    const _Py_CODEUNIT* instruction) {
  KnownSite& entry = place_of(known.sites, instruction);
  if (entry.instruction != instruction || entry.code != code.number) [[unlikely]] {
    const memory::Site site{utf8_of(object->co_filename), line_at(object, instruction),
                            utf8_of(object->co_qualname)};
    entry = {instruction, code.number, memory::site_id(site)};
  }
  return entry.site;
}

// A plain pointer: looking at it costs less than at an object that has to be made and ended.
constinit thread_local Known* known_of_thread = nullptr;
constinit thread_local bool thread_is_ending = false;

Known* make_known() {
  struct Holder {
    Known known;
    ~Holder() {
      known_of_thread = nullptr;
      thread_is_ending = true;
    }
  };
  if (!thread_is_ending) {
    thread_local const auto owner = std::make_unique<Holder>();
    known_of_thread = &owner->known;
  }
  return known_of_thread;
}

uint32_t site_of_frames(bool in_backward) noexcept {
  const PyThreadState* const thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) {
    return memory::kNoSite;
  }
  Known* const known = known_of_thread != nullptr ? known_of_thread : make_known();
  if (known == nullptr) {
    return memory::kNoSite;
  }
  for (Frame* frame = innermost(thread); frame != nullptr; frame = frame->previous) {
    PyCodeObject* const code = code_of(frame);
    if (code == nullptr) {
      continue;
    }
    const KnownCode& known_as = known_code(*known, code);
    if (known_as.owner == Owner::user) {
      return known_site(*known, known_as, code, instruction_of(frame));
    }
    if (in_backward && known_as.owner == Owner::engine) {
      return memory::kNoSite;
    }
  }
  return memory::kNoSite;
}

std::string folder_of_module(const char* name) {
  const auto file = py::module_::import(name).attr("__file__").cast<std::string>();
  return file.substr(0, file.rfind('/') + 1);
}

// torch calls its optimizers' hooks with (optimizer, args, kwargs); without pybind11 a call costs next to nothing.
PyObject* before_optimizer(PyObject* /*self*/, PyObject* const* /*given*/, Py_ssize_t /*count*/) {
  memory::set_optimizer_phase(true);
  Py_RETURN_NONE;
}

PyObject* after_optimizer(PyObject* /*self*/, PyObject* const* /*given*/, Py_ssize_t /*count*/) {
  memory::set_optimizer_phase(false);
  memory::mark_step_unless_by_hand();
  Py_RETURN_NONE;
}

void add_hook(py::module_& m, PyMethodDef& method, const char* name, _PyCFunctionFast hook) {
  const auto any =
      reinterpret_cast<void (*)()>(hook);  // what METH_FASTCALL means; keeps compilers quiet
  method = {name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, nullptr};
  m.add_object(name, py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
}

}  // namespace

void bind_frame_site(py::module_& m) {
  static PyMethodDef before;
  static PyMethodDef after;
  add_hook(m, before, "_memory_before_optimizer", &before_optimizer);
  add_hook(m, after, "_memory_after_optimizer", &after_optimizer);
  m.def("_read_frames", [](bool read) {
#ifndef Py_GIL_DISABLED
    if (read && torch_folder.empty()) {
      torch_folder = folder_of_module("torch");
      brimful_folder = folder_of_module("brimful");
    }
    memory::set_site_provider(read ? &site_of_frames : nullptr);
#endif
  });
}

}  // namespace brimful
