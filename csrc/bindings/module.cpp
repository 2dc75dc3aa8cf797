#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  brimful::bind_errors(m);
  brimful::bind_launch(m);
  brimful::bind_members(m);
  brimful::bind_memory(m);
  brimful::bind_frame_site(m);
  brimful::bind_live_table(m);
  brimful::bind_recording(m);
  brimful::bind_oom_report(m);
  brimful::bind_monitor(m);
  brimful::bind_explain(m);
  brimful::bind_batch(m);
  brimful::bind_split_types(m);
  brimful::bind_stop(m);
  brimful::bind_reducer(m);
  brimful::bind_torch_ddp_adapter(m);
  brimful::bind_sharded_model(m);
  brimful::bind_ladder(m);
  brimful::bind_loss_rule(m);
  brimful::bind_sizer(m);
  brimful::bind_global_sampler(m);
  brimful::bind_caching(m);
  brimful::bind_amp(m);
  brimful::bind_inference(m);
  brimful::bind_verify_split(m);
  brimful::bind_pipeline(m);
  brimful::bind_leaks(m);
  brimful::bind_summary(m);
  brimful::bind_split_backward(m);
  brimful::bind_pipeline_schedule(m);
}
