# Whether brimful has its CUDA sources, what its version says, and what to do where headers are missing: the one place that
# decides. CMakeLists.txt builds by it, after torch.cmake; setup.py and tools/setup.sh ask it (cmake/ask) before they build.
# Sets brimful_local_version, and where headers of torch's CUDA are missing brimful_cuda_packages, and brimful_cuda_refusal or
# brimful_cuda_warning.
set(BRIMFUL_CUDA ON CACHE STRING
  "CUDA sources where torch has CUDA: ON ends where headers are missing, AUTO then builds without them, OFF always does")
set_property(CACHE BRIMFUL_CUDA PROPERTY STRINGS ON AUTO OFF)
string(TOUPPER "${BRIMFUL_CUDA}" _value)
# 1. The version: which torch a build fits, and whether it has CUDA where torch has: "+torch2.15.cu13", "+torch2.15.cu13.cpu",
#    and "+torch2.15.cpu" for a torch without CUDA.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" brimful_torch_minor "${brimful_torch_version}")
string(REGEX MATCH "^[0-9]+" brimful_torch_cuda_major "${brimful_torch_cuda_version}")
set(brimful_local_version "torch${brimful_torch_minor}")
if(EXISTS "${brimful_torch_root}/lib/libtorch_cuda.so")
  string(APPEND brimful_local_version ".cu${brimful_torch_cuda_major}")
endif()
if(NOT brimful_torch_cuda)
  string(APPEND brimful_local_version ".cpu")
endif()

# 2. What pip has to install. The names of NVIDIA's packages changed with CUDA 13.
set(brimful_cuda_packages "")
set(brimful_cuda_refusal "")
set(brimful_cuda_warning "")
if(NOT _value MATCHES "^(ON|AUTO|OFF|1|YES|TRUE|Y|0|NO|FALSE|N)$")
  set(brimful_cuda_refusal "BRIMFUL_CUDA is none of ON, AUTO and OFF (value: ${BRIMFUL_CUDA})")
elseif(brimful_torch_cuda_missing)
  set(_pin "==${brimful_torch_cuda_version}.*")
  if(brimful_torch_cuda_major EQUAL 12)
    set(_package_of_crt/host_config.h "nvidia-cuda-nvcc-cu12${_pin}")
    set(_package_of_nv/target "nvidia-cuda-cccl-cu12${_pin}")
    set(_package_of_cuda_runtime_api.h "nvidia-cuda-runtime-cu12${_pin}")
  else()
    set(_package_of_crt/host_config.h "nvidia-cuda-crt${_pin}")
    set(_package_of_nv/target "nvidia-cuda-cccl${_pin}")
    set(_package_of_cuda_runtime_api.h "nvidia-cuda-runtime${_pin}")
  endif()
  set(_package_of_libcudart.so "${_package_of_cuda_runtime_api.h}")
  set(_package_of_nccl.h "nvidia-nccl-cu${brimful_torch_cuda_major}")
  file(GLOB _metadata "${brimful_torch_root}/../torch-${brimful_torch_version}*.dist-info/METADATA")
  if(_metadata) # has the version of NCCL that this torch requires
    file(STRINGS ${_metadata} _lines REGEX "^Requires-Dist: *nvidia-nccl-cu[0-9]+==" LIMIT_COUNT 1)
    if(_lines MATCHES "nvidia-nccl-cu[0-9]+==[0-9.]+")
      set(_package_of_nccl.h "${CMAKE_MATCH_0}")
    endif()
  endif()
  foreach(_part IN LISTS brimful_torch_cuda_missing)
    list(APPEND brimful_cuda_packages "${_package_of_${_part}}")
  endforeach()
  list(REMOVE_DUPLICATES brimful_cuda_packages)

  # 3. One sentence. The quotes keep a shell from looking for files of the name with the star.
  if(brimful_torch_cuda_version)
    set(_for "CUDA ${brimful_torch_cuda_version}")
    list(JOIN brimful_cuda_packages "' '" _remedy)
    set(_remedy "run `pip install --no-deps '${_remedy}'`")
  else() # a libtorch: no pip
    set(_for "CUDA")
    set(brimful_cuda_packages "")
    set(_remedy "install CUDA's toolkit and NCCL, or name the toolkit's folder in CUDA_HOME,")
  endif()
  list(JOIN brimful_torch_cuda_missing ", " _missing)
  string(CONCAT brimful_cuda_refusal
    "torch ${brimful_torch_version} is built for ${_for}, and what brimful's CUDA sources include is not all here "
    "(missing: ${_missing}): ${_remedy} and build again, or set BRIMFUL_CUDA=OFF to build brimful without CUDA")
  if(_value STREQUAL "AUTO")
    set(brimful_cuda_warning "building without CUDA: ${brimful_cuda_refusal}")
    set(brimful_cuda_refusal "")
  endif()
endif()
