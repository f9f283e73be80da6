// The bodies of all normalization kernels, by call.
#pragma once

#include "core/norm_gradient_sums.h"
#include "core/norm_kernels.h"
#include "core/norm_maps.h"
#include "core/norm_partials.h"
#include "core/norm_sums.h"

namespace gpudist {
namespace norming {

// Call `visit(Body{})` with the body of a call.
template <class Cells, class Results, class Visit>
auto visit_pass(const NormCall& call, const Visit& visit) {
  using Normalize = Normalized<Cells, Results>;
  using Gradient = GradientOfX<Cells, Results>;
  const bool by_columns = call.walk == NormWalk::kColumns, of_cells = call.walk == NormWalk::kCells;
  switch (call.pass) {
    case NormPass::kSums:
      return by_columns ? visit(SumsOfColumns<Cells>{}) : visit(SumsOfRows<Cells>{});
    case NormPass::kNormalize:
      if (by_columns) return visit(MapColumns<Normalize>{});
      return of_cells ? visit(MapRows<true, Normalize>{}) : visit(MapRows<false, Normalize>{});
    case NormPass::kGradientSums:
      if (by_columns) return visit(GradientSumsOfColumns<Cells, Results>{});
      return of_cells ? visit(GradientSumsOfCells<Cells, Results>{})
                      : visit(GradientSumsOfRows<Cells, Results>{});
    case NormPass::kGradient:
      if (by_columns) return visit(MapColumns<Gradient>{});
      return of_cells ? visit(MapRows<true, Gradient>{}) : visit(MapRows<false, Gradient>{});
    case NormPass::kFinishSums: return visit(FinishSums{});
    default: return visit(FinishGradientSums<typename Cells::Value>{});
  }
}

using Float16Cells = HalfCells<Float16Pair>;
using Bfloat16Cells = HalfCells<Bfloat16Pair>;

template <class Visit>
auto visit_body(const NormCall& call, const Visit& visit) {
  const NormArguments& a = call.arguments;
  if (a.dtype == Dtype::kFloat64) return visit_pass<Float64Cells, Float64Cells>(call, visit);
  if (!call.is_wide) return visit_pass<SingleCells, SingleCells>(call, visit);
  const bool is_widened = a.dtype != a.result_dtype;
  switch (a.dtype) {
    case Dtype::kFloat16:
      return is_widened ? visit_pass<Float16Cells, Float32Cells>(call, visit)
                        : visit_pass<Float16Cells, Float16Cells>(call, visit);
    case Dtype::kBfloat16:
      return is_widened ? visit_pass<Bfloat16Cells, Float32Cells>(call, visit)
                        : visit_pass<Bfloat16Cells, Bfloat16Cells>(call, visit);
    default: return visit_pass<Float32Cells, Float32Cells>(call, visit);
  }
}

// Number of loads of one tensor that a thread has in flight.
struct NormLoads {
  int of_rows, of_columns, of_cells;
};

template <class Cells, class Results>
constexpr NormLoads loads_of_cells(NormPass pass) {
  switch (pass) {
    case NormPass::kSums: return {kLoads<Cells>, kLoadsOfColumns, 0};
    case NormPass::kNormalize: return {kLoads<Cells>, kLoads<Cells>, 0};
    default:
      return {kLoadsOfTwo, kLoadsOfTwoColumns<Cells, Results>, kLoadsOfCells<Cells, Results>};
  }
}

constexpr NormLoads loads_of(NormPass pass, Dtype dtype, Dtype result_dtype, bool is_wide) {
  if (dtype == Dtype::kFloat64) return loads_of_cells<Float64Cells, Float64Cells>(pass);
  if (!is_wide) return loads_of_cells<SingleCells, SingleCells>(pass);
  if (dtype == Dtype::kFloat32) return loads_of_cells<Float32Cells, Float32Cells>(pass);
  // Both 16-bit formats have as many.
  return result_dtype == Dtype::kFloat32 ? loads_of_cells<Float16Cells, Float32Cells>(pass)
                                         : loads_of_cells<Float16Cells, Float16Cells>(pass);
}

}  // namespace norming

#ifndef __CUDACC__
// Run a call on the host, with the operations and their order of the kernels.
inline void run_norm(const NormCall& call) {
  norming::visit_body(call, [&](auto body) {
    using Body = decltype(body);
    for (uint32_t block = 0; block < norm_blocks(call); ++block) {
      typename Body::Shared shared;
      Body::run(call.arguments, block, norming::HostThreads{}, shared);
    }
    return 0;
  });
}
#endif

}  // namespace gpudist
