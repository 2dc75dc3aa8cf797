#pragma once
#include <torch/csrc/utils/pybind.h>

namespace brimful {

namespace py = pybind11;

void bind_amp(py::module_& m);
void bind_caching(py::module_& m);
void bind_errors(py::module_& m);
void bind_frame_site(py::module_& m);
void bind_explain(py::module_& m);
void bind_torch_ddp_adapter(py::module_& m);
void bind_sharded_model(py::module_& m);
void bind_global_sampler(py::module_& m);
void bind_leaks(py::module_& m);
void bind_ladder(py::module_& m);
void bind_launch(py::module_& m);
void bind_live_table(py::module_& m);
void bind_loss_rule(py::module_& m);
void bind_members(py::module_& m);
void bind_memory(py::module_& m);
void bind_batch(py::module_& m);
void bind_oom_report(py::module_& m);
void bind_monitor(py::module_& m);
void bind_pipeline_schedule(py::module_& m);
void bind_recording(py::module_& m);
void bind_reducer(py::module_& m);
void bind_sizer(py::module_& m);
void bind_inference(py::module_& m);
void bind_pipeline(py::module_& m);
void bind_verify_split(py::module_& m);
void bind_split_backward(py::module_& m);
void bind_split_types(py::module_& m);
void bind_stop(py::module_& m);
void bind_summary(py::module_& m);

}  // namespace brimful
