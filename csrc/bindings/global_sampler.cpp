#include <ATen/core/Tensor.h>
#include <brimful/launch/global_sampler.h>

#include <optional>
#include <utility>

#include "bindings/bindings.h"

namespace brimful {

namespace {

/// `batch` is rows, or with costs what they cost together.
GlobalSampler sampler_of(size_t size, int64_t batch, int rank, int world_size,
                         const std::optional<at::Tensor>& cost, GlobalSamplerOptions options) {
  if (!cost) {
    TORCH_CHECK_VALUE(batch >= 1, "a sampler needs rows and a batch (rows: ", size,
                      ", batch_size: ", batch, ")");
    return {size, static_cast<size_t>(batch), rank, world_size, std::move(options)};
  }
  TORCH_CHECK_VALUE(cost->dim() == 1 && static_cast<size_t>(cost->numel()) == size,
                    "cost needs a number for each row (rows: ", size, ", shape: ", cost->sizes(),
                    ")");
  TORCH_CHECK_TYPE(size == 0 || c10::isIntegralType(cost->scalar_type(), /*includeBool=*/false),
                   "a row's cost is an integer, such as its tokens (dtype: ", cost->scalar_type(),
                   ")");
  const auto all = cost->to(at::kCPU, at::kLong).contiguous();
  const auto* begin = all.const_data_ptr<int64_t>();
  return {RowCosts{{begin, begin + all.numel()}, batch}, rank, world_size, std::move(options)};
}

}  // namespace

void bind_global_sampler(py::module_& m) {
  py::class_<GlobalSampler>(m, "_GlobalSampler", "See brimful.GlobalSampler.")
      .def(py::init([](size_t size, int64_t batch_size, int rank, int world_size, bool shuffle,
                       uint64_t seed, bool drop_last, int64_t lag, int64_t min_rows,
                       std::vector<int64_t> max_rows, const std::optional<at::Tensor>& cost) {
             return sampler_of(size, batch_size, rank, world_size, cost,
                               {shuffle, seed, drop_last, lag, min_rows, std::move(max_rows)});
           }),
           py::kw_only(), py::arg("size"), py::arg("batch_size"), py::arg("rank"),
           py::arg("world_size"), py::arg("shuffle"), py::arg("seed"), py::arg("drop_last"),
           py::arg("lag"), py::arg("min_rows"), py::arg("max_rows"), py::arg("cost") = py::none())
      .def("set_epoch", &GlobalSampler::set_epoch, py::arg("epoch"))
      .def("reset", [](GlobalSampler& self) { self.reset(); })
      .def("next", [](GlobalSampler& self) { return self.next(); })
      .def("next_step", &GlobalSampler::next_step)
      .def_property_readonly("handed_out", &GlobalSampler::handed_out)
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
