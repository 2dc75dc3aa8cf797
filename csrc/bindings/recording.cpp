#include <brimful/memory/recording.h>
#include <brimful/probes/memory_report.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/whole_file.h"
#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "bindings/labels.h"

namespace brimful {
namespace {

using namespace memory;
using namespace py::literals;

using Recordings = std::vector<Recording>;

/// A device's part, with the lines' names.
struct DevicePart {
  const DeviceRecording& device;
  const std::vector<Site>& sites;
};

int64_t count_of(const DeviceRecording& device, bool steps) {
  return std::count_if(
      device.events.begin(), device.events.end(),
      [steps](const RecordedEvent& event) { return (event.kind == EventKind::step) == steps; });
}

py::list lines_of(const DevicePart& self) {
  py::list lines;
  for (const PeakSite& site : probes::peak_of(self.device).by_site) {
    lines.append(py::make_tuple(to_string(self.sites[site.site]), name_of(site.category),
                                site.bytes, site.blocks));
  }
  return lines;
}

void bind_recorded_values(py::module_& m) {
  py::class_<DevicePart>(m, "DeviceRecording", "What the memory of one device did.")
      .def_property_readonly("device", [](const DevicePart& self) { return self.device.device; })
      .def_property_readonly("events",
                             [](const DevicePart& self) { return count_of(self.device, false); })
      .def_property_readonly("steps",
                             [](const DevicePart& self) { return count_of(self.device, true); })
      .def_property_readonly("lost_events",
                             [](const DevicePart& self) { return self.device.lost_events; })
      .def_property_readonly(
          "peak_bytes", [](const DevicePart& self) { return probes::peak_of(self.device).bytes; })
      .def_property_readonly(
          "peak_by_category",
          [](const DevicePart& self) { return as_dict(probes::peak_of(self.device).by_category); })
      .def_property_readonly("peak_by_line", &lines_of);
  py::class_<Recording>(m, "MemoryRecording", "What the memory of a process did, event by event.")
      .def_readonly("rank", &Recording::rank)
      .def_readonly("ranks", &Recording::ranks)
      .def_property_readonly(
          "duration_s",
          [](const Recording& self) { return static_cast<double>(self.duration_ns) / 1e9; })
      .def_property_readonly(
          "devices",
          [](const py::object& self) {
            const auto& recording = self.cast<const Recording&>();
            py::list parts;
            for (const auto& device : recording.devices) {
              const py::object part = py::cast(DevicePart{device, recording.sites});
              py::detail::keep_alive_impl(part, self);
              parts.append(part);
            }
            return parts;
          })
      .def("save", &save_recording, "path"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_recording(py::module_& m) {
  bind_recorded_values(m);
  m.attr("_RING_BYTES") = kRingBytes;
  m.def("memory_start_recording", &start_recording, "ring_bytes"_a);
  m.def("memory_recording", &recording);
  m.def(
      "memory_stop_recording",
      [](const std::vector<std::pair<at::Tensor, std::string>>& tensors, std::optional<int> rank,
         std::optional<int> ranks) {
        const auto labels = labels_of(tensors);
        const py::gil_scoped_release released;
        Recording made = stop_recording(labels);
        made.rank = rank.value_or(made.rank);
        made.ranks = ranks.value_or(made.ranks);
        return made;
      },
      "labels"_a, "rank"_a, "ranks"_a);
  m.def("memory_load_recording", &load_recording, "path"_a,
        py::call_guard<py::gil_scoped_release>());
  m.def("_save_recording_anywhere", &save_recording_anywhere, "recording"_a, "path"_a,
        py::call_guard<py::gil_scoped_release>());
  m.def("_write_file", &write_file, "path"_a, "text"_a, py::call_guard<py::gil_scoped_release>());
  m.def("_write_memory_report", &probes::write_report, "recordings"_a, "path"_a,
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "_write_memory_difference",
      [](const Recording& before, const Recording& after, const std::string& path) {
        write_file(path, probes::to_html_difference(before, after));
      },
      "before"_a, "after"_a, "path"_a, py::call_guard<py::gil_scoped_release>());
  m.def(
      "_write_memory_trace",
      [](const Recordings& recordings, const std::string& path) {
        write_file(path, probes::to_chrome_trace(recordings));
      },
      "recordings"_a, "path"_a, py::call_guard<py::gil_scoped_release>());
  m.def(
      "_write_memory_viz",
      [](const Recordings& recordings, const std::string& path) {
        write_file(path, probes::to_memory_viz(recordings));
      },
      "recordings"_a, "path"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace brimful
