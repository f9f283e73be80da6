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
template <class Cells, class Visit>
auto visit_pass(const NormCall& call, const Visit& visit) {
  const bool by_columns = call.walk == NormWalk::kColumns, of_cells = call.walk == NormWalk::kCells;
  switch (call.pass) {
    case NormPass::kSums:
      return by_columns ? visit(SumsOfColumns<Cells>{}) : visit(SumsOfRows<Cells>{});
    case NormPass::kNormalize:
      if (by_columns) return visit(MapColumns<Cells, Normalized>{});
      return of_cells ? visit(MapRows<Cells, true, Normalized>{})
                      : visit(MapRows<Cells, false, Normalized>{});
    case NormPass::kGradientSums:
      if (by_columns) return visit(GradientSumsOfColumns<Cells>{});
      return of_cells ? visit(GradientSumsOfCells<Cells>{}) : visit(GradientSumsOfRows<Cells>{});
    case NormPass::kGradient:
      if (by_columns) return visit(MapColumns<Cells, GradientOfX>{});
      return of_cells ? visit(MapRows<Cells, true, GradientOfX>{})
                      : visit(MapRows<Cells, false, GradientOfX>{});
    case NormPass::kFinishSums: return visit(FinishSums{});
    default: return visit(FinishGradientSums{});
  }
}

template <class Visit>
auto visit_body(const NormCall& call, const Visit& visit) {
  if (!call.is_wide) return visit_pass<SingleCells>(call, visit);
  switch (call.arguments.dtype) {
    case Dtype::kFloat16: return visit_pass<HalfCells<Float16Pair>>(call, visit);
    case Dtype::kBfloat16: return visit_pass<HalfCells<Bfloat16Pair>>(call, visit);
    default: return visit_pass<Float32Cells>(call, visit);
  }
}

// Number of loads of one tensor that a thread has in flight.
struct NormLoads {
  int of_rows, of_columns, of_cells;
};

template <class Cells>
constexpr NormLoads loads_of_cells(NormPass pass) {
  switch (pass) {
    case NormPass::kSums: return {kLoads<Cells>, kLoadsOfColumns, 0};
    case NormPass::kNormalize: return {kLoads<Cells>, kLoads<Cells>, 0};
    default: return {kLoadsOfTwo, kLoadsOfTwoColumns<Cells>, kLoadsOfCells<Cells>};
  }
}

constexpr NormLoads loads_of(NormPass pass, Dtype dtype, bool is_wide) {
  if (!is_wide) return loads_of_cells<SingleCells>(pass);
  return dtype == Dtype::kFloat32 ? loads_of_cells<Float32Cells>(pass)
                                  : loads_of_cells<HalfCells<Float16Pair>>(pass);
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
