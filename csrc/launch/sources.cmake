brimful_sources(LIGHT
  cost_rule.cpp
  cost_sharing.cpp
  distributed_sampler.cpp
  global_sampler.cpp
  permutation.cpp
  row_sharing.cpp
  share_rule.cpp
  whole_replicas.cpp)
brimful_sources(HEAVY
  all_or_none.cpp
  checkpoint.cpp
  gloo_group.cpp
  init_from_env.cpp
  meet.cpp
  members.cpp
  members_form.cpp
  pulse.cpp
  run_ranks.cpp)
if(brimful_torch_cuda)
  brimful_sources(HEAVY_ALONE nccl_group.cpp)
else()
  brimful_sources(HEAVY_ALONE nccl_absent.cpp)
endif()
