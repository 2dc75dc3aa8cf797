#include <brimful/launch/members.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstring>

#include "base/fnv.h"
#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "launch/gloo_group.h"

namespace brimful {
namespace {
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::shared_ptr<Members> make_members(const StorePtr& store, std::string name, int world_size,
                                      int64_t heartbeat_ms, int64_t dead_after_ms,
                                      int64_t patience_ms, int64_t connect_ms, int64_t timeout_ms,
                                      std::optional<c10::Device> device, std::string replica,
                                      int pipeline_rank, int pipeline_size) {
  MembersOptions options;
  options.world_size = world_size;
  options.heartbeat = milliseconds(heartbeat_ms);
  options.dead_after = milliseconds(dead_after_ms);
  options.patience = milliseconds(patience_ms);
  options.connect = milliseconds(connect_ms);
  options.timeout = milliseconds(timeout_ms);
  options.device = device;
  options.replica = std::move(replica);
  options.pipeline_rank = pipeline_rank;
  options.pipeline_size = pipeline_size;
  const py::gil_scoped_release no_gil;
  return {new Members(store, std::move(name), options), [](Members* members) {
            const py::gil_scoped_release no_gil;  // its thread may log a line
            delete members;
          }};
}

/// A group of this process alone, in which a model may be wrapped before it enters one of several ranks.
Group group_of_one() {
  return launch::make_gloo_group(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                 launch::GlooDevice::loopback, milliseconds(60000));
}

/// Of the tensors' values, the same on every host.
uint64_t fingerprint_of(const std::vector<at::Tensor>& tensors) {
  Fnv<uint64_t> hash;
  for (const auto& tensor : tensors) {
    const auto on_host = tensor.detach().cpu().contiguous();
    const auto* bytes = static_cast<const char*>(on_host.const_data_ptr());
    size_t left = on_host.nbytes();
    for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), bytes += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes, sizeof(word));
      hash.add_word(word);
    }
    hash.add(std::string_view(bytes, left));
  }
  return hash.value();
}
}  // namespace

void bind_members(py::module_& m) {
  m.def("_group_of_one", &group_of_one, py::call_guard<py::gil_scoped_release>());
  m.def("_fingerprint_of", &fingerprint_of, py::arg("tensors"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<Membership>(m, "Membership", "One of the groups that follow each other.")
      .BRIMFUL_FIELDS(def_readonly, Membership, group, epoch, rank, world_size, names, waited_ms,
                      pipeline_group);
  py::class_<Members, std::shared_ptr<Members>>(m, "_Members", "See brimful.Members.")
      .def(py::init(&make_members), py::arg("store"), py::arg("name"), py::kw_only(),
           py::arg("world_size"), py::arg("heartbeat_ms"), py::arg("dead_after_ms"),
           py::arg("patience_ms"), py::arg("connect_ms"), py::arg("timeout_ms"), py::arg("device"),
           py::arg("replica"), py::arg("pipeline_rank"), py::arg("pipeline_size"))
      .def("enter", &Members::enter, py::arg("model"), py::arg("part") = std::string(),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("pipeline_size", &Members::pipeline_size)
      .def("meet", &Members::meet, py::arg("place"), py::arg("ready") = true,
           py::call_guard<py::gil_scoped_release>())
      .def("leave", &Members::leave, py::call_guard<py::gil_scoped_release>());
}

}  // namespace brimful
