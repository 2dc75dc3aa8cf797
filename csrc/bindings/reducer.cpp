#include <brimful/reducer/reducer.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "base/torch_compat.h"
#include "bindings/fields.h"
#include "bindings/gil.h"
#include "bindings/structure.h"
#include "reducer/at_exit.h"
#include "reducer/whole_path.h"

namespace brimful {
namespace {
FailureKind kind_of(bool out_of_memory) {
  return out_of_memory ? Status::out_of_memory : Status::error;
}

std::optional<c10::ScalarType> dtype_of(const py::object& dtype) {
  if (dtype.is_none()) {
    return std::nullopt;
  }
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "wire_dtype must be a torch.dtype (wire_dtype: ",
                   py::repr(dtype).cast<std::string>(), "); pass torch.bfloat16, say");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

/// For tests: of the reducers that this process makes.
std::optional<bool>& between_hosts() {
  static std::optional<bool> on;  // the GIL guards it
  return on;
}

using NoGil = py::call_guard<py::gil_scoped_release>;
using ReducerClass = py::class_<Reducer, std::shared_ptr<Reducer>>;

void bind_figures(py::module_& m) {
  py::class_<Reducer::Counters>(m, "ReducerCounters", "What a reducer has done since it was made.")
      .BRIMFUL_FIELDS(def_readonly, Reducer::Counters, steps, launches, host_waits, exchanges,
                      host_exchanges, regroups);
  py::class_<BucketTimes>(m, "BucketTimes")
      .BRIMFUL_FIELDS(def_readonly, BucketTimes, first_ms, ready_ms, launch_ms, done_ms, bytes,
                      parameters);
  py::class_<StepTimes>(m, "StepTimes")
      .BRIMFUL_FIELDS(def_readonly, StepTimes, step, backward_ms, copy_ms, launch_ms, wait_ms,
                      total_ms, bytes, straggler, straggler_ms, by_device, buckets);
}

void bind_create(ReducerClass& reducer) {
  reducer.def(
      py::init([](std::vector<at::Tensor> parameters, std::vector<at::Tensor> buffers,
                  const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  std::vector<std::string> names, std::vector<bool> sparse,
                  std::vector<bool> renormalised, std::vector<at::Tensor> frozen,
                  std::optional<double> bucket_cap_mb, double first_bucket_cap_mb,
                  std::vector<double> bucket_cap_mb_list, std::string plan,
                  const py::object& wire_dtype, bool error_feedback,
                  std::optional<double> gradient_predivide_factor, bool broadcast_buffers,
                  bool synchronise_at_start, bool check_updates) {
        ReducerOptions options;
        options.check_updates = check_updates;
        options.bucket_cap_mb = bucket_cap_mb;
        options.first_bucket_cap_mb = first_bucket_cap_mb;
        options.bucket_cap_mb_list = std::move(bucket_cap_mb_list);
        options.plan = std::move(plan);
        options.wire_dtype = dtype_of(wire_dtype);
        options.error_feedback = error_feedback;
        options.gradient_predivide_factor = gradient_predivide_factor;
        options.broadcast_buffers = broadcast_buffers;
        options.synchronise_at_start = synchronise_at_start;
        options.names = std::move(names);
        options.sparse = std::move(sparse);
        options.renormalised = std::move(renormalised);
        options.frozen = std::move(frozen);
        options.forwards_announced = true;
        options.between_hosts = between_hosts();
        const py::gil_scoped_release no_gil;
        return freed_without_gil(
            Reducer::create(std::move(parameters), std::move(buffers), group, options));
      }),
      py::arg("parameters"), py::arg("buffers"), py::arg("group"), py::kw_only(), py::arg("names"),
      py::arg("sparse"), py::arg("renormalised"), py::arg("frozen"), py::arg("bucket_cap_mb"),
      py::arg("first_bucket_cap_mb"), py::arg("bucket_cap_mb_list"), py::arg("plan"),
      py::arg("wire_dtype"), py::arg("error_feedback"), py::arg("gradient_predivide_factor"),
      py::arg("broadcast_buffers"), py::arg("synchronise_at_start"), py::arg("check_updates"));
}

void bind_regroup(py::module_& m, ReducerClass& reducer) {
  py::class_<Regrouped>(m, "Regrouped", "What the ranks of a new group agreed on.")
      .BRIMFUL_FIELDS(def_readonly, Regrouped, source, progress, whole);
  reducer
      .def(
          "regroup",
          [](Reducer& reducer, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
             int64_t progress, bool whole, bool synchronise) {
            return reducer.regroup(group, {progress, whole, synchronise});
          },
          py::arg("group"), py::kw_only(), py::arg("progress"), py::arg("whole"),
          py::arg("synchronise"), NoGil())
      .def_property_readonly("is_broken", &Reducer::is_broken)
      .def(
          "gather",
          [](Reducer& reducer, const py::bytes& own) {
            const auto text = own.cast<std::string>();
            std::vector<std::vector<uint8_t>> all;
            {
              const py::gil_scoped_release no_gil;
              all = gather_bytes(reducer, {text.begin(), text.end()});
            }
            py::list result;
            for (const auto& bytes : all) {
              result.append(py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
            }
            return result;
          },
          py::arg("own"));
}

void bind_buckets(ReducerClass& reducer) {
  reducer
      .def(
          "register_comm_hook",
          [](Reducer& reducer, py::object state, py::object hook, const std::string& name) {
            auto wrapped =
                std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
            const py::gil_scoped_release no_gil;
            reducer.register_comm_hook(std::move(wrapped), name);
          },
          py::arg("state"), py::arg("hook"), py::arg("name"))
      .def("clip_grad_norm", &Reducer::clip_grad_norm, py::arg("max_norm"), py::arg("norm_type"),
           NoGil())
      .def("nonfinite_gradient", &Reducer::nonfinite_gradient, NoGil())
      .def(
          "wait_for_sums", [](Reducer& reducer) { wait_for_sums(reducer); }, NoGil())
      .def(
          "require_sums", [](Reducer& reducer) { require_sums(reducer); }, NoGil())
      .def("times", &Reducer::times)
      .def("chrome_trace",
           [](const Reducer& reducer) { return to_chrome_trace(reducer.times(), reducer.rank()); })
      .def("describe_plan", &Reducer::describe_plan)
      .def_property_readonly("names", &Reducer::names)
      .def("replace_buffer", &Reducer::replace_buffer, py::arg("before"), py::arg("now"))
      .def("broadcast", &Reducer::broadcast, py::arg("tensors"), py::arg("source"), NoGil())
      .def_property_readonly("counters", &Reducer::counters)
      .def_property_readonly("plan", &Reducer::plan)
      .def_property_readonly("rank", &Reducer::rank)
      .def_property_readonly("world_size", &Reducer::world_size)
      .def_property_readonly("launched", &Reducer::launched)
      .def_property_readonly("buckets", &Reducer::buckets);
}

/// A method of the reducer's loop; Python's class has both.
template <typename Result, typename... Args>
auto of_loop(Result (PlainLoop::*method)(Args...)) {
  return [method](Reducer& reducer, Args... args) -> Result {
    return (reducer.loop().*method)(std::forward<Args>(args)...);
  };
}

void bind_loop(ReducerClass& reducer) {
  reducer.def("prepare_forward", &prepare_forward, NoGil())
      .def(
          "watch",
          [](Reducer& reducer, const py::object& outputs) {
            auto& loop = reducer.loop();
            for_each_tensor(outputs, [&](const at::Tensor& output) { loop.watch(output); });
            loop.forward_done();
          },
          py::arg("outputs"))
      .def("begin_join", of_loop(&PlainLoop::begin_join), py::arg("mean_of_active"),
           py::arg("throw_early"))
      .def("join_step", of_loop(&PlainLoop::join_step), py::arg("keep_gradients") = false, NoGil())
      .def("require_data", of_loop(&PlainLoop::require_data), NoGil())
      .def("any_rank", of_loop(&PlainLoop::any_rank), py::arg("own"), NoGil())
      .def("call_off", of_loop(&PlainLoop::call_off))
      .def("end_join", of_loop(&PlainLoop::end_join))
      .def_property_readonly("active", [](Reducer& reducer) { return reducer.loop().active(); })
      .def_property_readonly("stop", [](Reducer& reducer) { return reducer.loop().stop(); })
      .def("begin_scope", &begin_scope, NoGil())
      .def("end_scope_ok", of_loop(&PlainLoop::end_scope_ok), NoGil())
      .def_property(
          "sync", [](Reducer& reducer) { return reducer.loop().sync(); },
          [](Reducer& reducer, bool sync) { reducer.loop().set_sync(sync); })
      .def_property_readonly("owes", [](Reducer& reducer) { return reducer.loop().owes(); });
}

void bind_failures(ReducerClass& reducer) {
  reducer
      .def(
          "end_scope_failed",
          [](Reducer& reducer, bool out_of_memory, const std::string& text) {
            reducer.loop().end_scope_failed(kind_of(out_of_memory), text);
          },
          py::arg("out_of_memory"), py::arg("text"), NoGil())
      .def(
          "publish_failure",
          [](Reducer& reducer, bool out_of_memory, const std::string& text) {
            reducer.loop().publish_failure(kind_of(out_of_memory), text);
          },
          py::arg("out_of_memory"), py::arg("text"), NoGil())
      .def(
          "announce_failure",
          [](Reducer& reducer, bool out_of_memory, const std::string& text, int64_t patience_ms) {
            reducer.loop().announce_failure(kind_of(out_of_memory), text, patience_ms);
          },
          py::arg("out_of_memory"), py::arg("text"), py::arg("patience_ms"), NoGil());
}
}  // namespace

void bind_reducer(py::module_& m) {
  m.def("_release_groups", &release_groups, NoGil());
  m.def(
      "_configuration_of",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) { return configuration_of(*group); },
      py::arg("group"), NoGil());
  m.def(
      "_set_whole_path", [](bool on) { return std::exchange(WholePath::is_on(), on); },
      py::arg("on"));
  m.def(
      "_set_between_hosts",
      [](std::optional<bool> on) { return std::exchange(between_hosts(), on); }, py::arg("on"));
  bind_figures(m);
  ReducerClass reducer(m, "Reducer");
  bind_create(reducer);
  bind_regroup(m, reducer);
  bind_buckets(reducer);
  bind_loop(reducer);
  bind_failures(reducer);
}

}  // namespace brimful
