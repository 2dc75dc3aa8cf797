#include <ATen/core/Tensor.h>
#include <brimful/memory/categories.h>
#include <brimful/memory/live_table.h>
#include <brimful/probes/gpus.h>
#include <torch/csrc/autograd/python_variable.h>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "bindings/bindings.h"
#include "bindings/device.h"
#include "bindings/fields.h"
#include "bindings/graph_roots.h"
#include "bindings/labels.h"
#include "memory/tracker.h"

namespace brimful {
namespace {

using namespace memory;
using namespace py::literals;

Category category_named(const std::string& name) {
  for (size_t k = 0; k < kCategories; ++k) {
    if (name == name_of(static_cast<Category>(k))) {
      return static_cast<Category>(k);
    }
  }
  TORCH_CHECK_VALUE(false, "there is no such category (category: ", name, ")");
}

py::dict by_module(const Peak& peak) {
  py::dict found;
  for (const PeakModule& part : peak.by_module) {
    found[py::str(site(part.module).function)] = as_dict(part.by_category);
  }
  return found;
}

void bind_values(py::module_& m) {
  py::class_<Site>(m, "MemorySite", "A line of code.")
      .BRIMFUL_FIELDS(def_readonly, Site, file, line, function)
      .def("__str__", [](const Site& site) { return to_string(site); })
      .def("__repr__", [](const Site& site) { return to_string(site); });
  py::class_<LiveBlock>(m, "LiveBlock", "Memory that is in use, and where it was taken.")
      .def_property_readonly(
          "data", [](const LiveBlock& self) { return reinterpret_cast<uintptr_t>(self.data); })
      .BRIMFUL_FIELDS(def_readonly, LiveBlock, bytes, step, birth)
      .def_readonly("site_id", &LiveBlock::site)
      .def_property_readonly("site", [](const LiveBlock& self) { return site(self.site); })
      .def_property_readonly("module",
                             [](const LiveBlock& self) { return site(self.module).function; })
      .def_property_readonly("phase", [](const LiveBlock& self) { return name_of(self.phase); });
  py::class_<SiteUse>(m, "SiteUse", "What lives of what one line took in one phase.")
      .def_readonly("site_id", &SiteUse::site)
      .def_property_readonly("site", [](const SiteUse& self) { return site(self.site); })
      .def_property_readonly("phase", [](const SiteUse& self) { return name_of(self.phase); })
      .BRIMFUL_FIELDS(def_readonly, SiteUse, bytes, blocks, born);
  py::class_<TrackingCounts>(m, "TrackingCounts")
      .BRIMFUL_FIELDS(def_readonly, TrackingCounts, events, births, unsited);
}

void bind_peak(py::module_& m) {
  py::class_<PeakSite>(m, "PeakSite", "What one line held at the peak.")
      .def_property_readonly("site", [](const PeakSite& self) { return site(self.site); })
      .def_property_readonly("module",
                             [](const PeakSite& self) { return site(self.module).function; })
      .def_property_readonly("category",
                             [](const PeakSite& self) { return name_of(self.category); })
      .def_readonly("bytes", &PeakSite::bytes)
      .def_readonly("blocks", &PeakSite::blocks);
  py::class_<Peak>(m, "MemoryPeak", "What the memory was used for at its peak.")
      .def_readonly("bytes", &Peak::bytes)
      .def_readonly("step", &Peak::step)
      .def_property_readonly("phase", [](const Peak& self) { return name_of(self.phase); })
      .def_property_readonly("by_category",
                             [](const Peak& self) { return as_dict(self.by_category); })
      .def_property_readonly("by_module", &by_module)
      .def_readonly("before_bytes", &Peak::before_bytes)
      .def_readonly("by_site", &Peak::by_site);
  m.def(
      "memory_peak_by_category",
      [](py::handle device, const std::vector<std::pair<at::Tensor, std::string>>& labels) {
        return peak_by_category(as_device(device), labels_of(labels));
      },
      "device"_a, "labels"_a);
  m.def(
      "memory_context_bytes",
      [](py::handle device) {
        const auto asked = as_device(device);
        const py::gil_scoped_release no_gil;
        return probes::context_bytes(asked);
      },
      "device"_a);
  m.def(
      "memory_live_by_category",
      [](py::handle device, const std::vector<std::pair<at::Tensor, std::string>>& labels) {
        return as_dict(live_by_category(as_device(device), labels_of(labels)));
      },
      "device"_a, "labels"_a);
}

}  // namespace

py::dict as_dict(const CategoryBytes& bytes) {
  py::dict found;
  for (size_t k = 0; k < kCategories; ++k) {
    found[name_of(static_cast<Category>(k))] = bytes[k];
  }
  return found;
}

std::vector<Label> labels_of(const std::vector<std::pair<at::Tensor, std::string>>& tensors) {
  std::vector<Label> labels;
  for (const auto& [tensor, name] : tensors) {
    const Category category = category_named(name);
    const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (auto label = storage ? label_of(storage, category) : std::nullopt) {
      labels.push_back(*label);
    }
  }
  return labels;
}

void bind_live_table(py::module_& m) {
  bind_values(m);
  bind_peak(m);
  m.def("memory_start_tracking", &start_tracking);
  m.def("memory_stop_tracking", &stop_tracking);
  m.def("memory_tracking", &tracking);
  m.def("_follow_cuda", &follow_cuda);
  m.def("memory_mark_step", &mark_step);
  m.def(
      "_memory_name",
      [](const std::string& name) {
        return site_id({"", 0, name});
      },
      "name"_a);
  m.def("_memory_enter_module", &enter_module, "name"_a);
  m.def("_memory_leave_module", &leave_module);
  m.def("memory_current_step", &current_step);
  m.def("memory_site", &site, "id"_a);
  m.def(
      "memory_live_blocks", [](py::handle device) { return live_blocks(as_device(device)); },
      "device"_a);
  m.def(
      "memory_find_block",
      [](const at::Tensor& tensor) {
        const void* const data = storage_of(tensor);
        return data == nullptr ? std::nullopt : find_block(data, tensor.device());
      },
      "tensor"_a);
  m.def(
      "memory_live_by_site", [](py::handle device) { return live_by_site(as_device(device)); },
      "device"_a);
  m.def(
      "memory_tracking_counts",
      [](py::handle device) { return tracking_counts(as_device(device)); }, "device"_a);
}

}  // namespace brimful
