# Defines the target brimful::torch (and brimful::torch_python, brimful::gloo where they can be had) from an
# installed torch wheel or libtorch, without find_package(Torch): no CUDA language, no CUDA toolkit.
# Used by brimful's own build and, installed, by its users, who need no CUDA headers. Sets brimful_torch_version,
# brimful_torch_root, brimful_torch_gloo, brimful_torch_cuda (its headers are there) and, if so, brimful_torch_cudart;
# brimful_torch_cuda_version (what torch is built for, if known) and brimful_torch_cuda_missing (headers; none where
# BRIMFUL_CUDA is OFF). What it finds is cached as BRIMFUL_TORCH_*.
if(TARGET brimful::torch)
  return()
endif()

# 1. Where torch is: Torch_DIR, next to us in site-packages, CMAKE_PREFIX_PATH, and last the Python in use.
find_file(BRIMFUL_TORCH_CONFIG TorchConfig.cmake NO_DEFAULT_PATH
  HINTS ${Torch_DIR} "${CMAKE_CURRENT_LIST_DIR}/../../../../torch/share/cmake/Torch" ${CMAKE_PREFIX_PATH}
  PATH_SUFFIXES Torch share/cmake/Torch torch/share/cmake/Torch)
if(NOT BRIMFUL_TORCH_CONFIG)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_FOUND)
    execute_process(COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_file(BRIMFUL_TORCH_CONFIG TorchConfig.cmake NO_DEFAULT_PATH HINTS "${_dir}/share/cmake/Torch")
  endif()
endif()
if(NOT BRIMFUL_TORCH_CONFIG)
  message(FATAL_ERROR "brimful: torch was not found. Add the output of\n"
    "  python -c 'import torch; print(torch.utils.cmake_prefix_path)'\n"
    "to CMAKE_PREFIX_PATH, after a semicolon: -DCMAKE_PREFIX_PATH='THE PATH OF BRIMFUL;THAT OUTPUT'")
endif()
get_filename_component(brimful_torch_root "${BRIMFUL_TORCH_CONFIG}/../../../.." ABSOLUTE)
set(_lib "${brimful_torch_root}/lib")
get_filename_component(_site "${brimful_torch_root}/.." ABSOLUTE)
file(STRINGS "${brimful_torch_root}/include/torch/headeronly/version.h" _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2.\\3" brimful_torch_version "${_lines}")

# 2. The host part of torch. --no-as-needed: libtorch_cuda.so registers itself when loaded, nobody names a symbol of it.
#    libstdc++ comes first: torch's libraries export parts of another release's, which programs would be bound to.
add_library(brimful::torch INTERFACE IMPORTED)
set_target_properties(brimful::torch PROPERTIES INTERFACE_COMPILE_FEATURES cxx_std_20) # cmake/ask has no language to check
target_compile_definitions(brimful::torch INTERFACE USE_DISTRIBUTED)
target_include_directories(brimful::torch SYSTEM INTERFACE
  "${brimful_torch_root}/include" "${brimful_torch_root}/include/torch/csrc/api/include")
target_link_libraries(brimful::torch INTERFACE "${_lib}/libtorch.so" "${_lib}/libtorch_cpu.so" "${_lib}/libc10.so")
target_link_options(brimful::torch INTERFACE "LINKER:--no-as-needed" -lstdc++)
# The linker looks up what torch's libraries need in their turn; let it see the wheel's, not older system ones.
file(GLOB _dirs "${_site}/nvidia/*/lib")
foreach(_dir IN LISTS _dirs)
  target_link_options(brimful::torch INTERFACE "LINKER:-rpath-link,${_dir}")
endforeach()

# 3. CUDA headers, for code that includes c10/cuda/*.h or ProcessGroupNCCL.hpp: a toolkit, else the nvidia-* wheels, of which
#    those that torch requires lack some. A wheel may be in another site-packages (BRIMFUL_TORCH_NVIDIA: folders nvidia/).
set(brimful_torch_cuda OFF)
set(brimful_torch_cuda_version "")
set(brimful_torch_cuda_missing "")
if(EXISTS "${_lib}/libtorch_cuda.so")
  target_link_libraries(brimful::torch INTERFACE "${_lib}/libtorch_cuda.so" "${_lib}/libc10_cuda.so")
  if(EXISTS "${brimful_torch_root}/version.py") # a libtorch has none
    file(STRINGS "${brimful_torch_root}/version.py" _lines REGEX "^cuda[^_].*'[0-9]+")
    string(REGEX REPLACE "[^']*'([0-9.]+).*" "\\1" brimful_torch_cuda_version "${_lines}")
  endif()
endif()
if(EXISTS "${_lib}/libtorch_cuda.so" AND (NOT DEFINED BRIMFUL_CUDA OR BRIMFUL_CUDA))
  set(_cuda_wheels "")
  foreach(_dir "${_site}/nvidia" ${BRIMFUL_TORCH_NVIDIA})
    file(GLOB _dirs "${_dir}/cu1*/include" "${_dir}/cuda_*/include")
    list(APPEND _cuda_wheels ${_dirs})
  endforeach()
  find_path(BRIMFUL_TORCH_CUDA_INCLUDE crt/host_config.h
    HINTS ${CUDAToolkit_ROOT}/include $ENV{CUDA_HOME}/include ${_cuda_wheels} /usr/local/cuda/include)
  # Beside it, but for the wheels of CUDA 12, which are a folder each.
  find_path(BRIMFUL_TORCH_CCCL_INCLUDE nv/target HINTS "${BRIMFUL_TORCH_CUDA_INCLUDE}" ${_cuda_wheels})
  find_path(BRIMFUL_TORCH_CUDART_INCLUDE cuda_runtime_api.h HINTS "${BRIMFUL_TORCH_CUDA_INCLUDE}" ${_cuda_wheels})
  find_path(BRIMFUL_TORCH_NCCL_INCLUDE nccl.h HINTS "${_site}/nvidia/nccl/include" "${BRIMFUL_TORCH_CUDA_INCLUDE}")
  file(GLOB _cudart "${_site}/nvidia/cu1*/lib/libcudart.so.*" "${_site}/nvidia/cuda_runtime/lib/libcudart.so.*")
  find_file(BRIMFUL_TORCH_CUDART NAMES libcudart.so NO_DEFAULT_PATH HINTS "${BRIMFUL_TORCH_CUDA_INCLUDE}/../lib64" "${_lib}")
  if(NOT _cudart AND BRIMFUL_TORCH_CUDART)
    set(_cudart "${BRIMFUL_TORCH_CUDART}")
  endif()
  set(_parts crt/host_config.h nv/target cuda_runtime_api.h nccl.h libcudart.so)
  set(_places BRIMFUL_TORCH_CUDA_INCLUDE BRIMFUL_TORCH_CCCL_INCLUDE BRIMFUL_TORCH_CUDART_INCLUDE BRIMFUL_TORCH_NCCL_INCLUDE
    _cudart)
  foreach(_part _place IN ZIP_LISTS _parts _places)
    if(NOT ${_place})
      list(APPEND brimful_torch_cuda_missing ${_part})
    endif()
  endforeach()
  if(NOT brimful_torch_cuda_missing)
    set(brimful_torch_cuda ON)
    set(_dirs "${BRIMFUL_TORCH_NCCL_INCLUDE}" "${BRIMFUL_TORCH_CUDA_INCLUDE}" "${BRIMFUL_TORCH_CUDART_INCLUDE}"
      "${BRIMFUL_TORCH_CCCL_INCLUDE}")
    list(REMOVE_DUPLICATES _dirs)
    target_compile_definitions(brimful::torch INTERFACE USE_C10D_NCCL)
    target_include_directories(brimful::torch SYSTEM INTERFACE ${_dirs})
    list(GET _cudart 0 brimful_torch_cudart)
    target_link_libraries(brimful::torch INTERFACE "${brimful_torch_cudart}")
  endif()
endif()

# 4. Gloo: its headers are not in the wheel (Debian: libgloo-dev), the code is in libtorch_cpu.so.
find_path(BRIMFUL_TORCH_GLOO_INCLUDE gloo/rendezvous/store.h)
add_library(brimful::gloo INTERFACE IMPORTED)
target_link_libraries(brimful::gloo INTERFACE brimful::torch)
set(brimful_torch_gloo OFF)
if(BRIMFUL_TORCH_GLOO_INCLUDE)
  set(brimful_torch_gloo ON)
  target_compile_definitions(brimful::gloo INTERFACE USE_C10D_GLOO)
  target_include_directories(brimful::gloo SYSTEM INTERFACE "${BRIMFUL_TORCH_GLOO_INCLUDE}")
endif()

# 5. For Python modules only.
add_library(brimful::torch_python INTERFACE IMPORTED)
target_link_libraries(brimful::torch_python INTERFACE brimful::torch "${_lib}/libtorch_python.so")
message(STATUS "brimful: torch ${brimful_torch_version} in ${brimful_torch_root}, "
  "CUDA ${brimful_torch_cuda} (${BRIMFUL_TORCH_CUDA_INCLUDE}), gloo ${BRIMFUL_TORCH_GLOO_INCLUDE}")
