#include <brimful/reducer/torch_ddp_adapter.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/callbacks.h"

namespace brimful {

void bind_torch_ddp_adapter(py::module_& m) {
  py::class_<TorchDdpAdapter, std::shared_ptr<TorchDdpAdapter>>(
      m, "TorchDdpAdapter", "torch's DistributedDataParallel as a part of a BatchSizer's step.")
      .def(py::init([](std::vector<at::Tensor> parameters,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& side_group,
                       py::function reduce) {
             const auto kept = shared_object(std::move(reduce));
             return TorchDdpAdapter::create(std::move(parameters), side_group, [kept](int source) {
               call_python([&] { (*kept)(source); });
             });
           }),
           py::arg("parameters"), py::arg("side_group"), py::arg("reduce"))
      .def_property_readonly("rank", &TorchDdpAdapter::rank)
      .def_property_readonly("world_size", &TorchDdpAdapter::world_size);
}

}  // namespace brimful
