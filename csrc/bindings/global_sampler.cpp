#include <brimful/launch/global_sampler.h>

#include "bindings/bindings.h"

namespace brimful {

void bind_global_sampler(py::module_& m) {
  py::class_<GlobalSampler>(m, "_GlobalSampler", "See brimful.GlobalSampler.")
      .def(py::init([](size_t size, size_t batch_size, int rank, int world_size, bool shuffle,
                       uint64_t seed, bool drop_last, int64_t lag, int64_t min_rows,
                       std::vector<int64_t> max_rows) {
             return GlobalSampler(size, batch_size, rank, world_size,
                                  {shuffle, seed, drop_last, lag, min_rows, std::move(max_rows)});
           }),
           py::kw_only(), py::arg("size"), py::arg("batch_size"), py::arg("rank"),
           py::arg("world_size"), py::arg("shuffle"), py::arg("seed"), py::arg("drop_last"),
           py::arg("lag"), py::arg("min_rows"), py::arg("max_rows"))
      .def("set_epoch", &GlobalSampler::set_epoch, py::arg("epoch"))
      .def("reset", [](GlobalSampler& self) { self.reset(); })
      .def("next", [](GlobalSampler& self) { return self.next(); })
      .def("next_step", &GlobalSampler::next_step)
      .def("regroup", &GlobalSampler::regroup, py::arg("rank"), py::arg("world_size"),
           py::arg("max_rows"))
      .def(
          "note",
          [](GlobalSampler& self, const std::vector<double>& work_ms) { self.note(work_ms); },
          py::arg("work_ms"))
      .def("batches", &GlobalSampler::batches)
      .def("shares", &GlobalSampler::shares)
      .def_property_readonly("epoch", &GlobalSampler::epoch)
      .def_property_readonly("lag", &GlobalSampler::lag)
      .def("state", &GlobalSampler::state)
      .def("load_state", &GlobalSampler::load_state, py::arg("state"));
}

}  // namespace brimful
