// The kernels by name. The driver finds a kernel by a plain name, so each instance of a template
// has one here, for the device's compiler, which defines it, and for the host, which launches it.
#pragma once

#include "core/combine.h"
#include "core/norm_body.h"
#include "core/random_body.h"

namespace gpudist {

// Parameter of a kernel whose tables are passed with it. A launch costs more the larger it is.
template <uint32_t kBytes>
struct Inlined {
  CombineArguments arguments;
  uint32_t views_offset;
  alignas(16) unsigned char tables[kBytes];
};

constexpr uint32_t kFew = 1024;
constexpr uint32_t kSome = 3840;   // supported by every driver
constexpr uint32_t kMany = 16384;  // drivers for CUDA 12.1 and later allow 32 KiB

}  // namespace gpudist

// X(name, size of the tables)
#define GPUDIST_COMBINE_KERNELS(X) \
  X(combine_kernel_of_few, kFew)   \
  X(combine_kernel_of_some, kSome)

// X(name, draw, format of the cells)
#define GPUDIST_RANDOM_KERNELS_OF(X, draw, Draw)                       \
  X(random_kernel_##draw##_float16, Draw, randomly::Float16Cells)      \
  X(random_kernel_##draw##_bfloat16, Draw, randomly::Bfloat16Cells)    \
  X(random_kernel_##draw##_float32, Draw, randomly::PlainCells<float>) \
  X(random_kernel_##draw##_float64, Draw, randomly::PlainCells<double>)
#define GPUDIST_RANDOM_KERNELS(X)                           \
  X(random_kernel_kept, Draw::kKept, randomly::BoolCells)   \
  GPUDIST_RANDOM_KERNELS_OF(X, uniform, Draw::kUniform)     \
  GPUDIST_RANDOM_KERNELS_OF(X, normal, Draw::kNormal)       \
  GPUDIST_RANDOM_KERNELS_OF(X, bernoulli, Draw::kBernoulli) \
  GPUDIST_RANDOM_KERNELS_OF(X, scaled, Draw::kScaled)

// X(name, body); the body may contain commas
#define GPUDIST_NORM_KERNELS_WITH_RESULTS(X, cells, ...)                                           \
  X(norm_kernel_normalize_rows_##cells, norming::MapRows<false, norming::Normalized<__VA_ARGS__>>) \
  X(norm_kernel_normalize_cells_##cells, norming::MapRows<true, norming::Normalized<__VA_ARGS__>>) \
  X(norm_kernel_normalize_columns_##cells, norming::MapColumns<norming::Normalized<__VA_ARGS__>>)  \
  X(norm_kernel_gradient_sums_of_rows_##cells, norming::GradientSumsOfRows<__VA_ARGS__>)           \
  X(norm_kernel_gradient_sums_of_cells_##cells, norming::GradientSumsOfCells<__VA_ARGS__>)         \
  X(norm_kernel_gradient_sums_of_columns_##cells, norming::GradientSumsOfColumns<__VA_ARGS__>)     \
  X(norm_kernel_gradient_rows_##cells, norming::MapRows<false, norming::GradientOfX<__VA_ARGS__>>) \
  X(norm_kernel_gradient_cells_##cells, norming::MapRows<true, norming::GradientOfX<__VA_ARGS__>>) \
  X(norm_kernel_gradient_columns_##cells, norming::MapColumns<norming::GradientOfX<__VA_ARGS__>>)
#define GPUDIST_NORM_KERNELS_OF(X, cells, Cells)                        \
  X(norm_kernel_sums_of_rows_##cells, norming::SumsOfRows<Cells>)       \
  X(norm_kernel_sums_of_columns_##cells, norming::SumsOfColumns<Cells>) \
  GPUDIST_NORM_KERNELS_WITH_RESULTS(X, cells, Cells, Cells)
#define GPUDIST_NORM_KERNELS(X)                                                     \
  GPUDIST_NORM_KERNELS_OF(X, single, norming::SingleCells)                          \
  GPUDIST_NORM_KERNELS_OF(X, float16, norming::Float16Cells)                        \
  GPUDIST_NORM_KERNELS_OF(X, bfloat16, norming::Bfloat16Cells)                      \
  GPUDIST_NORM_KERNELS_OF(X, float32, norming::Float32Cells)                        \
  GPUDIST_NORM_KERNELS_WITH_RESULTS(X, float16_to_float32, norming::Float16Cells,   \
                                    norming::Float32Cells)                          \
  GPUDIST_NORM_KERNELS_WITH_RESULTS(X, bfloat16_to_float32, norming::Bfloat16Cells, \
                                    norming::Float32Cells)                          \
  GPUDIST_NORM_KERNELS_OF(X, float64, norming::Float64Cells)                        \
  X(norm_kernel_finish_sums, norming::FinishSums)                                   \
  X(norm_kernel_finish_gradient_sums, norming::FinishGradientSums<float>)           \
  X(norm_kernel_finish_gradient_sums_float64, norming::FinishGradientSums<double>)
