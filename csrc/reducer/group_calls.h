#pragma once
#include <ATen/ThreadLocalPythonObjects.h>

#include <utility>

namespace brimful {

/// While it lives, what this thread hands to a process group holds none of the objects that Python keeps in the thread
/// (torch leaves one in every backward). The group's thread may be the last to hold it, and a thread that needs an
/// interpreter which is gone ends the process.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() : kept_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(kept_)); }
  WithoutPythonObjects(const WithoutPythonObjects&) = delete;
  WithoutPythonObjects& operator=(const WithoutPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects kept_;
};

}  // namespace brimful
