# Sets GPUDIST_HAS_CUDA, and makes CUDA a language where there is a compiler for it.
# GPUDIST_CUDA=AUTO takes the first nvcc of PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda and the
# wheel nvidia-cuda-nvcc; ON fails without one.
set(GPUDIST_CUDA AUTO CACHE STRING "Build the CUDA half: AUTO, ON or OFF")
string(TOUPPER "${GPUDIST_CUDA}" GPUDIST_CUDA)
if(NOT GPUDIST_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GPUDIST_CUDA is ${GPUDIST_CUDA}, and must be AUTO, ON or OFF")
endif()

set(GPUDIST_HAS_CUDA OFF)
if(GPUDIST_CUDA STREQUAL OFF)
  return()
endif()

find_program(GPUDIST_NVCC nvcc PATHS
  "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin
  "${Python_SITELIB}/nvidia/cu13/bin")
if(NOT GPUDIST_NVCC)
  if(GPUDIST_CUDA STREQUAL ON)
    message(FATAL_ERROR "GPUDIST_CUDA is ON, but there is no nvcc in PATH, CUDA_HOME, CUDA_PATH, "
      "/usr/local/cuda or the wheel nvidia-cuda-nvcc")
  endif()
  message(STATUS "No nvcc: building without CUDA")
  return()
endif()

# A link beside other programs does not lead to the toolkit's folder.
file(REAL_PATH "${GPUDIST_NVCC}" nvcc)
execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version)
string(REGEX MATCH "release ([0-9.]+)" version "${version}")
if(CMAKE_MATCH_1 VERSION_LESS 12.1)
  set(text "nvcc ${CMAKE_MATCH_1} (${nvcc}) cannot build the kernels, whose parameters take more than "
    "4 KiB: 12.1 or later is needed")
  if(GPUDIST_CUDA STREQUAL ON)
    message(FATAL_ERROR ${text})
  endif()
  message(WARNING ${text} "; building without CUDA")
  return()
endif()
# Machine code for each generation, and PTX from which a driver makes that of any later one.
# GPUDIST_CUDA_ARCHITECTURES names others, for a build that only one machine is to run.
set(CMAKE_CUDA_ARCHITECTURES 80 90-real)
if(CMAKE_MATCH_1 VERSION_GREATER_EQUAL 12.8)
  list(APPEND CMAKE_CUDA_ARCHITECTURES 100-real 120-real)
endif()
if(GPUDIST_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${GPUDIST_CUDA_ARCHITECTURES})
endif()

# The wheel's libraries are in lib, where its nvcc looks in lib64 only.
cmake_path(GET nvcc PARENT_PATH folder)
if(NOT EXISTS "${folder}/../lib64" AND EXISTS "${folder}/../lib/libcudart_static.a")
  set(ENV{CUDAFLAGS} "$ENV{CUDAFLAGS} -L${folder}/../lib")
endif()
set(ENV{CUDACXX} "${nvcc}")
set(ENV{CUDAARCHS} "${CMAKE_CUDA_ARCHITECTURES}")
if(GPUDIST_CUDA STREQUAL AUTO)
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(WARNING "${nvcc} does not work: building without CUDA")
    return()
  endif()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# FindCUDAToolkit would want the shared one too, which the wheel has under another name.
find_library(GPUDIST_CUDART cudart_static
  PATHS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} NO_DEFAULT_PATH REQUIRED)
find_package(Threads REQUIRED)
set(GPUDIST_HAS_CUDA ON)
