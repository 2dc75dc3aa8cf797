# How brimful's own targets are compiled: language, warnings, sanitizers, ccache.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(CMAKE_CXX_FLAGS_QUICK "-O0 -DNDEBUG") # compiles in less time, to see that all compiles, links and runs
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# ccache, and precompiled headers that it can see through.
find_program(BRIMFUL_CCACHE ccache)
if(BRIMFUL_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros "${BRIMFUL_CCACHE}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()

# g++ collects its garbage again and again while it compiles torch's headers: 5 to 9 % of the time. With 4 GB for each
# core it may wait until it holds 2 GiB.
cmake_host_system_information(RESULT _memory_mb QUERY TOTAL_PHYSICAL_MEMORY)
cmake_host_system_information(RESULT _cores QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR _memory_mb "${_memory_mb} / ${_cores}")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND _memory_mb GREATER 4000)
  add_compile_options("SHELL:--param ggc-min-heapsize=2097152")
endif()

# Warnings and sanitizers for a target of ours. torch's headers are SYSTEM and stay silent.
function(brimful_own_target target)
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${BRIMFUL_WERROR}>:-Werror>)
  if(BRIMFUL_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    # It takes a source for a header where a unity file includes it.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
  if(BRIMFUL_SANITIZE)
    # GCC's -Wmaybe-uninitialized is wrong about libstdc++ under its own sanitizers.
    target_compile_options(${target} PRIVATE -fsanitize=${BRIMFUL_SANITIZE} -fno-omit-frame-pointer
      -Wno-maybe-uninitialized)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE -Wno-tsan) # torch's headers have a fence, which ThreadSanitizer does not see
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${BRIMFUL_SANITIZE})
  endif()
endfunction()

# Which sources are compiled as one: twelve of a folder, in the order of the list. g++ instantiates the templates of a
# precompiled header again in every file that it compiles: 3 s, most of the time of a small one. Names in anonymous
# namespaces have to differ within a group. Groups do not depend on the configuration, so that what compiles in one
# compiles in all; a source without a group is compiled by itself.
function(brimful_unity_groups)
  set(folder "")
  foreach(source IN LISTS ARGN)
    cmake_path(GET source PARENT_PATH parent)
    if(NOT parent MATCHES "^csrc/") # a C++ test: its names are in a namespace of its file's
      string(REGEX REPLACE "/.*" "" parent "${parent}")
    endif()
    if(NOT parent STREQUAL folder)
      set(folder "${parent}")
      string(MAKE_C_IDENTIFIER "${folder}" group)
      get_property(count GLOBAL PROPERTY brimful_unity_${group})
    endif()
    math(EXPR index "0${count} / 12")
    math(EXPR count "0${count} + 1")
    set_property(GLOBAL PROPERTY brimful_unity_${group} ${count})
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${group}_${index}")
  endforeach()
endfunction()

# nlohmann_json is in no public header.
find_path(BRIMFUL_JSON_INCLUDE nlohmann/json.hpp)
if(NOT BRIMFUL_JSON_INCLUDE)
  message(FATAL_ERROR "brimful: nlohmann/json.hpp was not found. Install it (Debian: nlohmann-json3-dev), "
    "or set BRIMFUL_JSON_INCLUDE to the folder that holds nlohmann/.")
endif()
add_library(brimful_json INTERFACE)
target_include_directories(brimful_json SYSTEM INTERFACE "${BRIMFUL_JSON_INCLUDE}")

# Links the package's Python files into `package`, so that an edit needs no build.
function(brimful_link_python_sources package)
  set(sources "${CMAKE_CURRENT_SOURCE_DIR}/python/brimful")
  file(GLOB files CONFIGURE_DEPENDS RELATIVE "${sources}"
    ${sources}/*.py ${sources}/*/*.py ${sources}/*.pyi ${sources}/py.typed)
  list(REMOVE_ITEM files _build_info.py)
  file(GLOB known "${package}/*.py" "${package}/*/*.py")
  foreach(file IN LISTS known)
    if(IS_SYMLINK "${file}" AND NOT EXISTS "${file}")
      file(REMOVE "${file}")
    endif()
  endforeach()
  foreach(file IN LISTS files)
    cmake_path(GET file PARENT_PATH folder)
    file(MAKE_DIRECTORY "${package}/${folder}")
    file(CREATE_LINK "${sources}/${file}" "${package}/${file}" SYMBOLIC)
  endforeach()
endfunction()
