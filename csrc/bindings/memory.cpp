#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <brimful/memory/system_limit.h>
#include <brimful/memory/trace.h>
#include <torch/csrc/Device.h>
#include <memory>
#include <string>
#include "base/format.h"
#include "base/text_stream.h"
#include "bindings/bindings.h"
#include "bindings/device.h"
#include "bindings/fields.h"
#include "bindings/gil.h"
#include "step/garbage.h"

namespace brimful {
namespace {

using namespace memory;
using namespace py::literals;

std::string repr(const Stats& stats) {
  if (!stats.counted) {
    return "Stats(unknown: the device's allocator keeps no statistics)";
  }
  TextStream out;
  const auto bytes = [](int64_t count) { return format_bytes(count); };
  out << "Stats(used=" << bytes(stats.used_bytes) << ", peak=" << bytes(stats.peak_bytes)
      << ", limit=" << (stats.limit_bytes ? bytes(*stats.limit_bytes) : "None")
      << ", reserved=" << bytes(stats.reserved_bytes) << ", allocations=" << stats.allocations
      << ", ooms=" << stats.ooms << ")";
  return out.str();
}

std::string repr(const SystemLimit& limit) {
  return "SystemLimit(limit=" + format_bytes(limit.limit_bytes) +
         ", free=" + format_bytes(limit.free_bytes) +
         ", margin=" + format_bytes(limit.margin_bytes) +
         ", bound=" + format_bytes(limit.bound_bytes) + ", source=" + name_of(limit.source) +
         ", where=" + limit.where + ")";
}

/// None from an allocator that keeps no statistics.
template <auto kNumber>
std::optional<int64_t> counted(const Stats& stats) {
  return stats.counted ? std::optional(stats.*kNumber) : std::nullopt;
}

/// A context manager over a scope; each entry makes a new one.
struct PyPeakScope {
  explicit PyPeakScope(c10::Device device) : device(device) {}
  void enter() {
    scope.reset();
    scope = std::make_unique<PeakScope>(device);
  }
  void exit() {
    last_bytes = peak_bytes();
    scope.reset();
  }
  int64_t peak_bytes() const { return scope ? scope->peak_bytes() : last_bytes; }

  c10::Device device;
  std::unique_ptr<PeakScope> scope;
  int64_t last_bytes = 0;
};

struct PyTraceScope {
  void exit() {
    trace = scope ? scope->trace() : trace;
    scope.reset();
  }
  std::unique_ptr<TraceScope> scope;
  Trace trace;
};

struct PyUnlimited {
  void exit() { scope.reset(); }
  std::unique_ptr<Unlimited> scope;
};

struct PyFaultAt {
  explicit PyFaultAt(int64_t index) : index(index) {}
  void exit() {
    seen = scope ? scope->seen() : seen;
    fired = scope ? scope->fired() : fired;
    scope.reset();
  }

  int64_t index;
  std::unique_ptr<FaultAt> scope;
  int64_t seen = 0;
  bool fired = false;
};

void bind_stats(py::module_& m) {
  py::class_<Stats>(m, "MemoryStats",
                    "What a device's memory holds: bytes in use, their peak, the limit.")
      .def_property_readonly("used_bytes", &counted<&Stats::used_bytes>)
      .def_property_readonly("peak_bytes", &counted<&Stats::peak_bytes>)
      .def_readonly("limit_bytes", &Stats::limit_bytes)
      .def_property_readonly("reserved_bytes", &counted<&Stats::reserved_bytes>)
      .def_property_readonly("allocations", &counted<&Stats::allocations>)
      .def_property_readonly("ooms", &counted<&Stats::ooms>)
      .def("__repr__", [](const Stats& stats) { return repr(stats); });
  m.def("memory_install", &install);
  m.def("_format_bytes", &format_bytes, "bytes"_a);
  m.def(
      "memory_stats", [](py::handle device) { return stats(as_device(device)); }, "device"_a);
  m.def(
      "_memory_capacity_bytes",
      [](py::handle device) { return memory::capacity_bytes(as_device(device)); },
      py::arg("device"), "All that tensors may take; None where there is no bound.");
  m.def(
      "_memory_used_bytes", [](py::handle device) { return stats(as_device(device)).used_bytes; },
      "device"_a);
  m.def(
      "memory_set_limit",
      [](py::handle device, std::optional<int64_t> bytes) { set_limit(as_device(device), bytes); },
      "device"_a, "bytes"_a.none(true));
  m.def(
      "memory_set_limit",
      [](py::handle device, const std::string& word) {
        TORCH_CHECK_VALUE(word == "auto", "bytes is not a limit (bytes: ", word,
                          "); pass a number of bytes, 'auto' or None");
        set_limit_auto(as_device(device));
      },
      "device"_a, "bytes"_a);
  m.def(
      "memory_reset_peak", [](py::handle device) { reset_peak(as_device(device)); }, "device"_a);
  m.def(
      "memory_release_cached",
      [](py::handle given) {
        const auto device = as_device(given);
        const py::gil_scoped_release no_gil;  // waits for the device
        release_cached(device);
      },
      "device"_a);
}

void bind_system_limit(py::module_& m) {
  py::class_<SystemLimit>(m, "SystemLimit",
                          "What tensors may take of this system's memory, and what decided it.")
      .BRIMFUL_FIELDS(def_readonly, SystemLimit, limit_bytes, free_bytes, margin_bytes, bound_bytes)
      .def_property_readonly("source",
                             [](const SystemLimit& limit) { return name_of(limit.source); })
      .def_readonly("where", &SystemLimit::where)
      .def("__repr__", [](const SystemLimit& limit) { return repr(limit); });
  m.def("memory_system_limit", &system_limit);
}

/// `with` around what `enter` puts into the object, and its exit() takes out.
template <typename Scope, typename Enter>
py::class_<Scope>& as_context(py::class_<Scope>& scope, const Enter& enter) {
  return scope
      .def("__enter__",
           [enter](py::object self) {
             enter(self.cast<Scope&>());
             return self;
           })
      .def("__exit__", [](Scope& self, const py::args&) { self.exit(); });
}

void bind_scopes(py::module_& m) {
  auto peak = py::class_<PyPeakScope>(m, "_PeakScope",
                                      "with _PeakScope(device) as scope: scope.peak_bytes");
  peak.def(
      py::init([](py::handle device) { return std::make_unique<PyPeakScope>(as_device(device)); }),
      "device"_a);
  as_context(peak, [](PyPeakScope& self) {
    self.enter();
  }).def_property_readonly("peak_bytes", &PyPeakScope::peak_bytes);

  auto trace = py::class_<PyTraceScope>(
      m, "_TraceScope", "with _TraceScope() as scope: ...; scope.trace: this thread's CPU bytes");
  trace.def(py::init<>());
  as_context(trace, [](PyTraceScope& self) {
    self.scope = std::make_unique<TraceScope>();
  }).def_property_readonly("trace", [](const PyTraceScope& self) {
    return self.scope ? self.scope->trace() : self.trace;
  });

  auto unlimited = py::class_<PyUnlimited>(
      m, "_Unlimited", "This thread's CPU allocations are never refused inside.");
  unlimited.def(py::init<>());
  as_context(unlimited, [](PyUnlimited& self) { self.scope = std::make_unique<Unlimited>(); });

  auto fault = py::class_<PyFaultAt>(
      m, "_FaultAt", "This thread's CPU allocation number index raises torch.OutOfMemoryError.");
  fault.def(py::init<int64_t>(), "index"_a);
  as_context(fault, [](PyFaultAt& self) { self.scope = std::make_unique<FaultAt>(self.index); })
      .def_property_readonly(
          "fired",
          [](const PyFaultAt& self) { return self.scope ? self.scope->fired() : self.fired; })
      .def_property_readonly("seen", [](const PyFaultAt& self) {
        return self.scope ? self.scope->seen() : self.seen;
      });
}

}  // namespace

c10::Device as_device(py::handle given) {
  if (THPDevice_Check(given.ptr())) {
    return given.cast<c10::Device>();
  }
  if (!py::isinstance<py::str>(given)) {
    throw py::type_error("device must be a torch.device or a string such as 'cpu' (device: " +
                         py::repr(given).cast<std::string>() + ")");
  }
  const auto name = given.cast<std::string>();
  try {
    return c10::Device(name);
  } catch (const c10::Error&) {
  }
  throw py::value_error("device is not known (device: " + name +
                        "); use 'cpu', 'cuda' or 'cuda:0'");
}

namespace {
void collect_garbage() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const Gil gil;
  try {
    py::module_::import("gc").attr("collect")();
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable("brimful's collection of garbage");
  }
}
}  // namespace

void bind_memory(py::module_& m) {
  detail::set_garbage_collector(&collect_garbage);
  bind_stats(m);
  bind_system_limit(m);
  bind_scopes(m);
}

}  // namespace brimful
