#include <brimful/reducer/torch_ddp_adapter.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/callbacks.h"

namespace brimful {

void bind_torch_ddp_adapter(py::module_& m) {
  py::class_<TorchDdpAdapter, std::shared_ptr<TorchDdpAdapter>>(
      m, "TorchDdpAdapter", "torch's DistributedDataParallel as a part of a BatchSizer's step.")
      .def(py::init([](std::vector<at::Tensor> parameters,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& side_group,
                       py::function reduce, bool check_updates, py::function follow) {
             const auto kept = shared_object(std::move(reduce));
             const auto kept_follow = shared_object(std::move(follow));
             return freed_without_gil(TorchDdpAdapter::create(
                 std::move(parameters), side_group,
                 [kept](int source) { call_python([&] { (*kept)(source); }); }, check_updates,
                 [kept_follow] {
                   c10::intrusive_ptr<c10d::ProcessGroup> group;
                   call_python([&] {
                     const auto now = (*kept_follow)();
                     if (!now.is_none()) {
                       group = now.cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
                     }
                   });
                   return group;
                 }));
           }),
           py::arg("parameters"), py::arg("side_group"), py::arg("reduce"),
           py::arg("check_updates"), py::arg("follow"))
      .def_property_readonly("rank", &TorchDdpAdapter::rank)
      .def_property_readonly("world_size", &TorchDdpAdapter::world_size);
}

}  // namespace brimful
