#include <brimful/reducer/reducer.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/batch.h"
#include "reducer/at_exit.h"

namespace brimful {
namespace {
FailureKind kind_of(bool out_of_memory) {
  return out_of_memory ? FailureKind::out_of_memory : FailureKind::error;
}
}  // namespace

void bind_reducer(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("_release_groups", &release_groups, NoGil());
  py::class_<Reducer::Counters>(m, "ReducerCounters", "What a reducer has done since it was made.")
      .def_readonly("steps", &Reducer::Counters::steps)
      .def_readonly("launches", &Reducer::Counters::launches)
      .def_readonly("host_waits", &Reducer::Counters::host_waits)
      .def_readonly("exchanges", &Reducer::Counters::exchanges);
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init([](std::vector<at::Tensor> parameters, std::vector<at::Tensor> buffers,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::vector<std::string> names, std::vector<bool> sparse,
                       double bucket_cap_mb, double first_bucket_cap_mb, bool broadcast_buffers,
                       bool synchronise_at_start) {
             const ReducerOptions options{bucket_cap_mb,     first_bucket_cap_mb,
                                          broadcast_buffers, synchronise_at_start,
                                          std::move(names),  std::move(sparse)};
             const py::gil_scoped_release no_gil;
             return Reducer::create(std::move(parameters), std::move(buffers), group, options);
           }),
           py::arg("parameters"), py::arg("buffers"), py::arg("group"), py::kw_only(),
           py::arg("names"), py::arg("sparse"), py::arg("bucket_cap_mb"),
           py::arg("first_bucket_cap_mb"), py::arg("broadcast_buffers"),
           py::arg("synchronise_at_start"))
      .def("prepare_forward", &Reducer::prepare_forward, NoGil())
      .def(
          "watch",
          [](Reducer& reducer, const py::object& outputs) {
            for_each_tensor(outputs, [&](const at::Tensor& output) { reducer.watch(output); });
            reducer.forward_done();
          },
          py::arg("outputs"))
      .def("begin_scope", &Reducer::begin_scope, NoGil())
      .def("end_scope_ok", &Reducer::end_scope_ok)
      .def(
          "end_scope_failed",
          [](Reducer& reducer, bool out_of_memory, const std::string& text) {
            reducer.end_scope_failed(kind_of(out_of_memory), text);
          },
          py::arg("out_of_memory"), py::arg("text"), NoGil())
      .def(
          "publish_failure",
          [](Reducer& reducer, bool out_of_memory, const std::string& text) {
            reducer.publish_failure(kind_of(out_of_memory), text);
          },
          py::arg("out_of_memory"), py::arg("text"), NoGil())
      .def(
          "announce_failure",
          [](Reducer& reducer, bool out_of_memory, const std::string& text, int64_t patience_ms) {
            reducer.announce_failure(kind_of(out_of_memory), text, patience_ms);
          },
          py::arg("out_of_memory"), py::arg("text"), py::arg("patience_ms"), NoGil())
      .def_property("sync", &Reducer::sync, &Reducer::set_sync)
      .def_property_readonly("owes", &Reducer::owes)
      .def_property_readonly("counters", &Reducer::counters)
      .def_property_readonly("plan", &Reducer::plan)
      .def_property_readonly("rank", &Reducer::rank)
      .def_property_readonly("world_size", &Reducer::world_size)
      .def_property_readonly("launched", &Reducer::launched)
      .def_property_readonly("buckets", &Reducer::buckets);
}

}  // namespace brimful
