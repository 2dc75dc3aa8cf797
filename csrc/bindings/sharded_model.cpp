#include <brimful/sharded/sharded_model.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/callbacks.h"

namespace brimful {
namespace {
/// A method of Python's object that the core calls, without the GIL.
template <typename Result, typename... Arguments>
std::function<Result(Arguments...)> method_of(const std::shared_ptr<py::object>& object,
                                              const char* name) {
  return [object, name](Arguments... arguments) {
    return call_python([&] {
      const auto result = object->attr(name)(arguments...);
      if constexpr (!std::is_void_v<Result>) {
        return result.template cast<Result>();
      }
    });
  };
}

at::Tensor tensor_or_none(const std::shared_ptr<py::object>& object, int64_t source) {
  return call_python([&] {
    const py::object shard = object->attr("shard_of")(source);
    return shard.is_none() ? at::Tensor() : shard.cast<at::Tensor>();
  });
}
}  // namespace

void bind_sharded_model(py::module_& m) {
  py::class_<ShardedModel, std::shared_ptr<ShardedModel>>(
      m, "ShardedModel", "A model of shards as a part of a BatchSizer's step.")
      .def(py::init([](std::vector<at::Tensor> parameters,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& side_group, py::object shards,
                       std::vector<int> rows_of) {
             const auto kept = shared_object(std::move(shards));
             ShardedModelHooks hooks;
             hooks.in_attempt = method_of<void, bool>(kept, "in_attempt");
             hooks.reset = method_of<void>(kept, "reset");
             hooks.gradients = method_of<std::vector<at::Tensor>>(kept, "gradients");
             hooks.source_of_call = method_of<int64_t>(kept, "source_of_call");
             hooks.shard_of = [kept](int64_t source) { return tensor_or_none(kept, source); };
             hooks.members_of =
                 method_of<std::vector<int>, const c10::intrusive_ptr<c10d::ProcessGroup>&>(
                     kept, "members_of");
             return freed_without_gil(ShardedModel::create(std::move(parameters), side_group,
                                                           std::move(hooks), std::move(rows_of)));
           }),
           py::arg("parameters"), py::arg("side_group"), py::arg("shards"), py::arg("rows_of"))
      .def_property_readonly("rank", &ShardedModel::rank)
      .def_property_readonly("world_size", &ShardedModel::world_size)
      .def_property_readonly("collectives", &ShardedModel::collectives)
      .def_property_readonly("drained", &ShardedModel::drained);
}

}  // namespace brimful
