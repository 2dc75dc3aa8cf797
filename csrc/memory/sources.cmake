brimful_sources(LIGHT
  block_category.cpp
  block_table.cpp
  caching_expandable.cpp
  caching_model.cpp
  caching_pool.cpp
  caching_release.cpp
  categories.cpp
  cgroup.cpp
  cpu_allocator.cpp
  live_table.cpp
  oom_observer.cpp
  origin.cpp
  others.cpp
  recorded_device.cpp
  recording.cpp
  recording_file.cpp
  sites.cpp
  stats.cpp
  system_limit.cpp)
brimful_sources(HEAVY
  host_tensor.cpp
  moment.cpp)
if(brimful_torch_cuda)
  brimful_sources(LIGHT_ALONE cuda.cpp cuda_caching.cpp cuda_follow.cpp cuda_trace.cpp cuda_workspaces.cpp)
else()
  brimful_sources(LIGHT_ALONE cuda_absent.cpp)
endif()
