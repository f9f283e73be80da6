# Sets GPUDIST_IMAGES, the source that has the compiled kernels, or none of them in a build without CUDA.
# All else is plain C++: it needs no CUDA headers, and finds the driver at run time.
#
# GPUDIST_NVRTC names a library of NVRTC (libnvrtc.so.12) that compiles the kernels; otherwise nvcc does.
# GPUDIST_CUDA=AUTO takes the first nvcc of PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda and the wheel
# nvidia-cuda-nvcc; ON fails without a compiler.
set(GPUDIST_CUDA AUTO CACHE STRING "Build the CUDA half: AUTO, ON or OFF")
set(GPUDIST_NVRTC "" CACHE FILEPATH "Library of NVRTC that compiles the kernels")
string(TOUPPER "${GPUDIST_CUDA}" GPUDIST_CUDA)
if(NOT GPUDIST_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GPUDIST_CUDA is ${GPUDIST_CUDA}, and must be AUTO, ON or OFF")
endif()

set(GPUDIST_IMAGES csrc/device/no_images.cpp)
if(GPUDIST_CUDA STREQUAL OFF)
  return()
endif()

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
if(GPUDIST_NVRTC)
  set(compiler "${GPUDIST_NVRTC}")
  set(fmad_off --fmad=false)
else()
  find_program(GPUDIST_NVCC nvcc PATHS
    "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin
    "${Python_SITELIB}/nvidia/cu13/bin")
  if(NOT GPUDIST_NVCC)
    if(GPUDIST_CUDA STREQUAL ON)
      message(FATAL_ERROR "GPUDIST_CUDA is ON, but GPUDIST_NVRTC names no library of NVRTC, and there is "
        "no nvcc in PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or the wheel nvidia-cuda-nvcc")
    endif()
    message(STATUS "No nvcc: building without CUDA")
    return()
  endif()
  # A link beside other programs does not lead to the toolkit's folder.
  file(REAL_PATH "${GPUDIST_NVCC}" compiler)
  set(fmad_off -fmad=false)
endif()

set(device_code "${CMAKE_CURRENT_SOURCE_DIR}/cmake/device_code.py")
execute_process(COMMAND "${Python_EXECUTABLE}" "${device_code}" version "${compiler}"
  OUTPUT_VARIABLE version ERROR_VARIABLE error RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  set(text "${compiler} does not work: ${error}")
else()
  math(EXPR major "${version} / 1000")
  math(EXPR minor "${version} % 1000 / 10")
  if(version LESS 12010)
    set(text "${compiler} is of CUDA ${major}.${minor} and cannot compile the kernels, whose parameters take "
      "more than 4 KiB: 12.1 or later is needed")
  endif()
endif()
if(text)
  if(GPUDIST_CUDA STREQUAL ON)
    message(FATAL_ERROR ${text})
  endif()
  message(WARNING ${text} "; building without CUDA")
  return()
endif()
message(STATUS "Kernels: compiled by ${compiler} of CUDA ${major}.${minor}, for drivers of CUDA ${major} and later")

# Machine code for each generation, and PTX from which a driver makes that of any later one.
# GPUDIST_CUDA_ARCHITECTURES names others, for a build that only one machine is to run.
set(architectures 80 90-real)
if(version GREATER_EQUAL 12080)
  list(APPEND architectures 100-real 120-real)
endif()
if(GPUDIST_CUDA_ARCHITECTURES)
  set(architectures ${GPUDIST_CUDA_ARCHITECTURES})
endif()
set(codes)
foreach(architecture ${architectures})
  string(REGEX MATCH "^[0-9]+" number "${architecture}")
  if(NOT architecture MATCHES "-virtual$")
    list(APPEND codes sm_${number})
  endif()
  if(NOT architecture MATCHES "-real$")
    list(APPEND codes compute_${number})
  endif()
endforeach()

# Compile a source as a unit of images; the other arguments are the compiler's options.
set(images)
set(image_files)
file(GLOB headers CONFIGURE_DEPENDS csrc/core/*.h csrc/device/kernel_list.h csrc/device/rtc/*)
function(gpudist_unit unit source)
  foreach(code ${codes})
    set(image "${CMAKE_CURRENT_BINARY_DIR}/${unit}.${code}")
    add_custom_command(OUTPUT "${image}"
      COMMAND "${Python_EXECUTABLE}" "${device_code}" compile "${compiler}"
        "${CMAKE_CURRENT_SOURCE_DIR}/${source}" ${code} "${image}" ${ARGN}
      DEPENDS "${source}" ${headers} "${device_code}" VERBATIM)
    list(APPEND images "${unit}=${image}")
    list(APPEND image_files "${image}")
  endforeach()
  set(images "${images}" PARENT_SCOPE)
  set(image_files "${image_files}" PARENT_SCOPE)
endfunction()
# Only the products that the source adds in one operation: as on the host.
gpudist_unit(norm_kernels csrc/device/norm_kernels.cu ${fmad_off})
gpudist_unit(combine_kernels csrc/device/combine_kernels.cu -DGPUDIST_SMALL_PARAMETERS_ONLY)
gpudist_unit(combine_large csrc/device/combine_kernels.cu -DGPUDIST_LARGE_PARAMETER_ONLY)
gpudist_unit(random_cells csrc/device/random_cells.cu)

set(GPUDIST_IMAGES "${CMAKE_CURRENT_BINARY_DIR}/embedded_images.cpp")
add_custom_command(OUTPUT "${GPUDIST_IMAGES}"
  COMMAND "${Python_EXECUTABLE}" "${device_code}" embed "${compiler}" "${GPUDIST_IMAGES}" ${images}
  DEPENDS ${image_files} "${device_code}" VERBATIM)
