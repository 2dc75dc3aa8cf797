#include <brimful/probes/explain.h>
#include <algorithm>
#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "bindings/native_read.h"

namespace brimful {
namespace {

using namespace probes;
using namespace py::literals;

/// The innermost frame of this thread that is neither torch's nor ours, as "train.py:31 in forward".
std::string python_site(const std::vector<std::string>& not_in) {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return "";  // a thread of torch's: no frame of Python's is on it
  }
  const py::gil_scoped_acquire gil;  // torch let it go on the way to the operator
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const auto* fields = reinterpret_cast<PyCodeObject*>(code.ptr());
    const auto file = to_string(fields->co_filename);
    const auto inside = [&](const std::string& folder) { return file.starts_with(folder); };
    if (std::none_of(not_in.begin(), not_in.end(), inside)) {
      return file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(raw)) +
             " in " + to_string(fields->co_name);
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return "";
}

void bind_ring(py::module_& m) {
  py::class_<OpRecord>(m, "OpRecord", "An operator that this process began.")
      .BRIMFUL_FIELDS(def_readonly, OpRecord, name, tensors, where, backward, free_bytes,
                      indices_dropped);
  m.def(
      "_start_op_ring",
      [](std::vector<std::string> not_in) {
        start_op_ring([not_in = std::move(not_in)] { return python_site(not_in); });
      },
      "not_in"_a);
  // An operator of another thread may hold the ring's lock; none waits for the GIL under it.
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("_stop_op_ring", &stop_op_ring, NoGil());
  m.def("_clear_op_ring", &clear_op_ring, NoGil());
  m.def("_op_ring_is_on", &op_ring_is_on, NoGil());
  m.def("_op_ring_records", &op_ring_records, NoGil());
  m.def(
      "_op_ring_index_findings",
      [] {
        std::vector<std::string> texts;
        for (const auto& finding : op_ring_index_findings()) {
          texts.push_back(to_string(finding));
        }
        return texts;
      },
      NoGil());
}

}  // namespace

void bind_explain(py::module_& m) {
  bind_ring(m);
  py::class_<Explanation>(m, "Explanation", "What an error means, and what to do.")
      .BRIMFUL_FIELDS(def_readonly, Explanation, kind, is_memory, cause, remedy, evidence)
      .def("__str__", [](const Explanation& self) { return to_string(self); })
      .def("__repr__", [](const Explanation& self) { return to_string(self); });
  m.def(
      "_explain",
      [](std::string text, std::vector<std::string> types, std::optional<int64_t> free_bytes,
         std::optional<int64_t> workspace_bytes, bool look) {
        ErrorEvidence evidence;
        if (look) {
          const py::gil_scoped_release no_gil;
          evidence = evidence_now();
        }
        evidence.free_bytes = free_bytes ? free_bytes : evidence.free_bytes;
        evidence.workspace_bytes = workspace_bytes;
        return explain_error({std::move(text), std::move(types)}, evidence);
      },
      "text"_a, "types"_a, "free_bytes"_a, "workspace_bytes"_a, "look"_a);
}

}  // namespace brimful
